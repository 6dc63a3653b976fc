/* --flashrecovery as Slurm hands it to us: typed, inherited, wrong, and in slurmstepd. */
#include <getopt.h>

#include "check.h"
#include "fake_spank.h"
#include "flashrec.h"

static void start(void)
{
	fake_reset();
	CHECK(flashrec_option_register(NULL) == ESPANK_SUCCESS);
	optarg = NULL;
	optind = 0;
}

/* As getopt does: the option was the word before `optind`. */
static int type(char *argument, int where)
{
	optarg = argument;
	optind = where + 1;
	return fake.option.cb(fake.option.val, argument, 0);
}

static int inherit(const char *argument)
{
	return fake.option.cb(fake.option.val, argument, 0);
}

static void test_registered(void)
{
	start();
	CHECK(fake.num_registered == 1);
	CHECK_TEXT(fake.option.name, "flashrecovery");
	CHECK(fake.option.has_arg == optional_argument);
	CHECK(!flashrec_option()->is_given);
}

static void test_last_one_counts(void)
{
	char two[] = "spares=02", off[] = "off";

	start();
	CHECK(inherit("tier=pool") == 0);
	CHECK(flashrec_option()->is_given && !flashrec_option()->is_typed);
	CHECK(type(two, 3) == 0);
	CHECK_TEXT(flashrec_option()->spec.text, "spares=2");
	CHECK(type(NULL, 5) == 0);
	CHECK_TEXT(flashrec_option()->spec.text, "");
	CHECK(type(off, 6) == 0);
	CHECK(flashrec_option()->spec.is_off);
	CHECK(flashrec_option()->num_typed == 3);
	CHECK(flashrec_option()->typed[0] == 3 && flashrec_option()->typed[1] == 5);
}

/* Slurm 22.05 hands an option without argument down as this text. */
static void test_null_in_the_environment_means_no_argument(void)
{
	start();
	CHECK(inherit("(null)") == 0);
	CHECK_TEXT(flashrec_option()->spec.text, "");
	CHECK_TEXT(fake.said, "");
}

static void test_wrong_one_is_refused_with_the_grammar(void)
{
	char wrong[] = "spares=two";

	start();
	CHECK(type(wrong, 1) != 0);
	CHECK(strstr(fake.said, "spares=COUNT") && strstr(fake.said, "tier=hot|warm|pool"));
	CHECK(strstr(fake.said, "not a number of 1 to 6 digits: \"two\""));
	CHECK(!flashrec_option()->is_given);
}

static void test_slurmstepd_refuses_and_says_nothing(void)
{
	start();
	CHECK(fake.option.cb(0, "spares=two", 1) == 0);
	CHECK(!flashrec_option()->is_given);
	CHECK(fake.option.cb(0, "spares=2", 1) == 0);
	CHECK(fake.option.cb(0, NULL, 1) == 0);
	CHECK(flashrec_option()->is_given && flashrec_option()->num_typed == 0);
	CHECK_TEXT(fake.said, "");
}

static void test_more_than_can_be_remembered(void)
{
	start();
	for (int i = 1; i <= FLASHREC_MAX_TYPED + 5; i++)
		CHECK(type(NULL, i) == 0);
	CHECK(flashrec_option()->typed[FLASHREC_MAX_TYPED - 1] == FLASHREC_MAX_TYPED);
	CHECK(flashrec_option()->num_typed == FLASHREC_MAX_TYPED + 5);
}

static void test_registered_again_starts_anew(void)
{
	start();
	CHECK(type(NULL, 1) == 0);
	start();
	CHECK(!flashrec_option()->is_given && flashrec_option()->num_typed == 0);
}

int main(void)
{
	test_registered();
	test_last_one_counts();
	test_null_in_the_environment_means_no_argument();
	test_wrong_one_is_refused_with_the_grammar();
	test_slurmstepd_refuses_and_says_nothing();
	test_more_than_can_be_remembered();
	test_registered_again_starts_anew();
	PASSED("option");
	return 0;
}
