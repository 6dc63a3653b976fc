#include "args.h"

#include <stddef.h>
#include <string.h>

static const char EXECUTABLE[] = "flashrec=";
static const char NO_KILL[] = "no_kill=cli_filter";

/* Keys that other parts of the suite read from the same line. */
static const char *const OTHERS_KEYS[] = {
    "pool=",   "feature=", "size=",  "max_per_job=", "max_per_user=", "max_per_partition=",
    "extend=", "delay=",   "drain=", "max_drain=",   "substitutes=",
};

static bool begins_with(const char *word, const char *start)
{
	return strncmp(word, start, strlen(start)) == 0;
}

static bool is_known_to_others(const char *word)
{
	for (size_t i = 0; i < sizeof(OTHERS_KEYS) / sizeof(OTHERS_KEYS[0]); i++)
		if (begins_with(word, OTHERS_KEYS[i]))
			return true;
	return false;
}

struct flashrec_args flashrec_args_read(int argc, char **argv)
{
	struct flashrec_args args = {.executable = NULL};

	for (int i = 0; i < argc; i++) {
		/* A relative path would be another one in each folder. */
		if (begins_with(argv[i], EXECUTABLE) && argv[i][sizeof(EXECUTABLE) - 1] == '/')
			args.executable = argv[i] + sizeof(EXECUTABLE) - 1;
		else if (strcmp(argv[i], NO_KILL) == 0)
			args.filter_sets_no_kill = true;
		else if (!is_known_to_others(argv[i]) && !args.wrong)
			args.wrong = argv[i];
	}
	return args;
}
