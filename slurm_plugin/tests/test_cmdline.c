/* The command line as the kernel shows it: this test starts itself with odd words. */
#include <unistd.h>

#include "check.h"
#include "cmdline.h"

bool __real_flashrec_cmdline_read(struct flashrec_cmdline *line);
int __real_execv(const char *path, char *const argv[]);

enum { LONG = 100000 };

static void check_joined(const struct flashrec_cmdline *line)
{
	char *text = flashrec_cmdline_join(line, 3, 1000);

	CHECK_TEXT(text, "odd  two words");
	free(text);
	text = flashrec_cmdline_join(line, 3, sizeof("odd  two words"));
	CHECK(text);
	free(text);
	CHECK(!flashrec_cmdline_join(line, 3, sizeof("odd  two words") - 1));
	CHECK(!flashrec_cmdline_join(line, 0, 1000));
	CHECK(!flashrec_cmdline_join(line, line->argc, 16384));
}

int main(int argc, char **argv)
{
	static char odd[] = "odd", empty[] = "", words[] = "two words", lines[] = "a\nb\t\xff";
	static char text[LONG + 1];
	char *again[] = {odd, empty, words, lines, text, NULL};
	struct flashrec_cmdline line;

	memset(text, 'x', LONG);
	if (strcmp(argv[0], odd) != 0) {
		__real_execv("/proc/self/exe", again);
		CHECK(!"started again");
	}
	CHECK(__real_flashrec_cmdline_read(&line));
	CHECK(line.argc == 5 && argc == 5 && !line.argv[5]);
	for (int i = 0; i < 5; i++)
		CHECK_TEXT(line.argv[i], again[i]);
	check_joined(&line);
	flashrec_cmdline_free(&line);
	PASSED("cmdline");
	return 0;
}
