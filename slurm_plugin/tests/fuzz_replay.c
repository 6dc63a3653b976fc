/* Plays known inputs through the fuzz target, without libFuzzer: each file as a whole, and each of
 * its lines. */
#include <stdint.h>

#include "check.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MAX_INPUT = 1 << 20 };

static unsigned int play(const char *path)
{
	static char text[MAX_INPUT];
	FILE *file = fopen(path, "r");
	unsigned int count = 1;
	size_t length;

	CHECK(file);
	length = fread(text, 1, sizeof(text), file);
	fclose(file);
	LLVMFuzzerTestOneInput((const uint8_t *)text, length);
	for (char *at = text, *end = text + length; at < end; count++) {
		char *stop = memchr(at, '\n', (size_t)(end - at));

		stop = stop ? stop : end;
		LLVMFuzzerTestOneInput((const uint8_t *)at, (size_t)(stop - at));
		at = stop + 1;
	}
	return count;
}

int main(int argc, char **argv)
{
	unsigned int count = 0;

	for (int i = 1; i < argc; i++)
		count += play(argv[i]);
	CHECK(count > 20);
	printf("ok   fuzz target, %u known inputs\n", count);
	return 0;
}
