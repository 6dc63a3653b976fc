#include "cmdline.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char *read_all(int fd, size_t *length)
{
	size_t size = 4096;
	char *text = malloc(size);

	*length = 0;
	while (text) {
		ssize_t got = read(fd, text + *length, size - *length);

		if (got == 0)
			return text;
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			break;
		*length += (size_t)got;
		if (*length == size) {
			char *larger = realloc(text, size *= 2);

			if (!larger)
				break;
			text = larger;
		}
	}
	free(text);
	return NULL;
}

/* Takes `text` over: words that each end with a zero. */
static bool split(char *text, size_t length, struct flashrec_cmdline *line)
{
	size_t at = 0;

	line->argc = 0;
	for (size_t i = 0; i < length; i++)
		line->argc += text[i] == '\0';
	line->argv = calloc((size_t)line->argc + 1, sizeof(line->argv[0]));
	if (line->argc == 0 || text[length - 1] != '\0' || !line->argv) {
		free(line->argv);
		free(text);
		return false;
	}
	for (int i = 0; i < line->argc; i++) {
		line->argv[i] = text + at;
		at += strlen(text + at) + 1;
	}
	return true;
}

bool flashrec_cmdline_read(struct flashrec_cmdline *line)
{
	size_t length;
	char *text;
	int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return false;
	text = read_all(fd, &length);
	close(fd);
	return text && split(text, length, line);
}

void flashrec_cmdline_free(struct flashrec_cmdline *line)
{
	free(line->argv[0]);
	free(line->argv);
}

char *flashrec_cmdline_join(const struct flashrec_cmdline *line, int count, size_t max)
{
	size_t length = 0;
	char *text, *at;

	for (int i = 0; i < count; i++)
		length += strlen(line->argv[i]) + 1;
	if (length == 0 || length > max || !(text = malloc(length)))
		return NULL;
	at = text;
	for (int i = 0; i < count; i++) {
		size_t word = strlen(line->argv[i]);

		memcpy(at, line->argv[i], word);
		at[word] = i + 1 < count ? ' ' : '\0';
		at += word + 1;
	}
	return text;
}
