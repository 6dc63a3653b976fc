/* The words behind flashrecovery.so in plugstack.conf. */
#include "args.h"
#include "check.h"

static struct flashrec_args read_words(char *first, char *second)
{
	char *words[] = {first, second};

	return flashrec_args_read(second ? 2 : 1, words);
}

int main(void)
{
	char executable[] = "flashrec=/opt/flashrec/bin/flashrec",
	     relative[] = "flashrec=bin/flashrec";
	char pool[] = "pool=night", limit[] = "max_per_user=4", filter[] = "no_kill=cli_filter";
	char unknown[] = "colour=red", empty[] = "", filter_typo[] = "no_kill=yes";
	struct flashrec_args args = flashrec_args_read(0, NULL);

	CHECK(!args.executable && !args.wrong && !args.filter_sets_no_kill);

	args = read_words(pool, executable);
	CHECK_TEXT(args.executable, "/opt/flashrec/bin/flashrec");
	CHECK(!args.wrong);

	args = read_words(limit, filter);
	CHECK(args.filter_sets_no_kill && !args.wrong && !args.executable);

	args = read_words(unknown, empty);
	CHECK_TEXT(args.wrong, "colour=red");

	args = read_words(filter_typo, NULL);
	CHECK_TEXT(args.wrong, "no_kill=yes");
	CHECK(!args.filter_sets_no_kill);

	/* It would be another program in each folder. */
	args = read_words(relative, executable);
	CHECK_TEXT(args.wrong, "flashrec=bin/flashrec");
	CHECK_TEXT(args.executable, "/opt/flashrec/bin/flashrec");
	PASSED("args");
	return 0;
}
