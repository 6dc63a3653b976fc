/* What all unit tests use: CHECK and CHECK_TEXT end the program at the first thing that is not so.
 */
#ifndef FLASHREC_CHECK_H
#define FLASHREC_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what)                                                                                \
	do {                                                                                       \
		if (!(what)) {                                                                     \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what);         \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

#define CHECK_TEXT(is, wanted)                                                                     \
	do {                                                                                       \
		const char *is_ = (is), *wanted_ = (wanted);                                       \
		if (!is_ || strcmp(is_, wanted_) != 0) {                                           \
			fprintf(stderr, "%s:%d: %s is \"%s\", not \"%s\"\n", __FILE__, __LINE__,   \
				#is, is_ ? is_ : "(null)", wanted_);                               \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

/*
 * In a test where the process is replaced or ends, and then goes on: it frees nothing, as it need
 * not. For AddressSanitizer.
 */
#define PROCESS_ENDS                                                                               \
	__attribute__((visibility("default"))) const char *__asan_default_options(void);           \
	const char *__asan_default_options(void)                                                   \
	{                                                                                          \
		return "detect_leaks=0";                                                           \
	}                                                                                          \
	struct process_ends

#define PASSED(name) printf("ok   %s\n", name)

#endif
