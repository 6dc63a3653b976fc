/* What sbatch and salloc export to the job. */
#include <errno.h>
#include <getopt.h>

#include "check.h"
#include "fake_spank.h"
#include "flashrec.h"

static const char *const ALL[] = {"FLASHREC_PLUGIN",      "FLASHREC_SPEC",
				  "FLASHREC_SUBMIT_LINE", "FLASHREC_NO_KILL",
				  "FLASHREC_HANDED_OVER", "SLURM_SPANK_FLASHREC_SPEC"};
static struct flashrec_args args;

/* `script`: where the script is in the command line. */
static void start(char **cmdline, int script)
{
	fake_reset();
	fake.context = S_CTX_ALLOCATOR;
	fake.cmdline = cmdline;
	memset(&args, 0, sizeof(args));
	for (size_t i = 0; i < sizeof(ALL) / sizeof(ALL[0]); i++)
		unsetenv(ALL[i]);
	CHECK(flashrec_option_register(NULL) == ESPANK_SUCCESS);
	optind = script;
}

static char sbatch[] = "sbatch", nodes[] = "-N2", job[] = "job.sh", no_kill[] = "--no-kill";
static char flag[] = "--flashrecovery=spares=1";
static char *plain[] = {sbatch, nodes, job, no_kill, NULL};
static char *with_flag[] = {sbatch, nodes, flag, job, no_kill, NULL};

static void test_without_the_option_nothing_is_exported(void)
{
	start(plain, 2);
	CHECK(flashrec_allocator_post_opt(NULL, &args) == 0);
	for (size_t i = 0; i < sizeof(ALL) / sizeof(ALL[0]); i++)
		CHECK(!getenv(ALL[i]));
	CHECK(fake.kept.count == 0);
	CHECK_TEXT(fake.said, "");
}

static void test_option_is_exported(void)
{
	start(with_flag, 3);
	fake.option.cb(0, "spares=01", 0);
	CHECK(flashrec_allocator_post_opt(NULL, &args) == 0);
	CHECK_TEXT(getenv("FLASHREC_PLUGIN"), "1");
	CHECK_TEXT(getenv("FLASHREC_SPEC"), "spares=1");
	/* The words behind the script are the script's: its --no-kill is not sbatch's. */
	CHECK_TEXT(getenv("FLASHREC_SUBMIT_LINE"), "sbatch -N2 --flashrecovery=spares=1");
	CHECK(!getenv("FLASHREC_NO_KILL"));
	CHECK_TEXT(fake_value(&fake.kept, "FLASHREC_SPEC"), "spares=1");
	CHECK_TEXT(fake_value(&fake.kept, "FLASHREC_PLUGIN"), "1");
	CHECK_TEXT(fake_value(&fake.kept, "FLASHREC_SUBMIT_LINE"),
		   "sbatch -N2 --flashrecovery=spares=1");
}

/* The command line says nothing about --no-kill then. */
static void test_filter_that_adds_no_kill(void)
{
	start(with_flag, 3);
	fake.option.cb(0, "spares=1", 0);
	args.filter_sets_no_kill = true;
	CHECK(flashrec_allocator_post_opt(NULL, &args) == 0);
	CHECK_TEXT(getenv("FLASHREC_NO_KILL"), "1");
	CHECK(!getenv("FLASHREC_SUBMIT_LINE"));
	/* The filter leaves these alone. */
	start(with_flag, 3);
	fake.option.cb(0, "off", 0);
	args.filter_sets_no_kill = true;
	CHECK(flashrec_allocator_post_opt(NULL, &args) == 0);
	CHECK_TEXT(getenv("FLASHREC_SPEC"), "off");
	CHECK(!getenv("FLASHREC_NO_KILL") && !getenv("FLASHREC_SUBMIT_LINE"));
}

static void test_other_jobs_variables_do_not_stay(void)
{
	start(plain, 2);
	for (size_t i = 0; i < sizeof(ALL) / sizeof(ALL[0]); i++)
		setenv(ALL[i], "old", 1);
	CHECK(flashrec_allocator_post_opt(NULL, &args) == 0);
	for (size_t i = 0; i < sizeof(ALL) / sizeof(ALL[0]); i++)
		CHECK(!getenv(ALL[i]));
}

static void test_users_own_variables_stay(void)
{
	start(plain, 2);
	setenv("FLASHREC_NO_KILL", "1", 1);
	setenv("FLASHREC_SUBMIT_LINE", "mine", 1);
	CHECK(flashrec_allocator_post_opt(NULL, &args) == 0);
	CHECK_TEXT(getenv("FLASHREC_NO_KILL"), "1");
	CHECK_TEXT(getenv("FLASHREC_SUBMIT_LINE"), "mine");
}

static void check_no_line(void)
{
	fake.option.cb(0, "spares=1", 0);
	setenv("FLASHREC_PLUGIN", "1", 1);
	setenv("FLASHREC_SUBMIT_LINE", "old", 1);
	CHECK(flashrec_allocator_post_opt(NULL, &args) == 0);
	CHECK_TEXT(getenv("FLASHREC_SPEC"), "spares=1");
	CHECK(!getenv("FLASHREC_SUBMIT_LINE"));
}

/* A line that is not known, or too long for an environment, is left out: unknown is not empty. */
static void test_line_that_cannot_be_told(void)
{
	static char wrap[20000] = "--wrap=";
	static char *long_line[] = {sbatch, wrap, NULL};

	memset(wrap + strlen(wrap), 'x', sizeof(wrap) - strlen(wrap) - 1);
	start(long_line, 2);
	check_no_line();
	start(plain, 2);
	fake.cmdline = NULL;
	check_no_line();
}

static void test_wrong_argument_is_told_to_who_uses_the_option(void)
{
	start(plain, 2);
	args.wrong = "colour=red";
	CHECK(flashrec_allocator_post_opt(NULL, &args) == 0);
	CHECK_TEXT(fake.said, "");
	fake.option.cb(0, NULL, 0);
	CHECK(flashrec_allocator_post_opt(NULL, &args) == 0);
	CHECK(strstr(fake.said, "colour=red"));
}

static void test_called_twice(void)
{
	start(with_flag, 3);
	fake.option.cb(0, "spares=1", 0);
	CHECK(flashrec_allocator_post_opt(NULL, &args) == 0);
	CHECK(flashrec_allocator_post_opt(NULL, &args) == 0);
	CHECK_TEXT(getenv("FLASHREC_SPEC"), "spares=1");
	CHECK_TEXT(getenv("FLASHREC_SUBMIT_LINE"), "sbatch -N2 --flashrecovery=spares=1");
}

/* The allocation of a bare srun, and companion jobs. */
static void test_salloc_of_flashrec_is_left_alone(void)
{
	char *before = program_invocation_short_name;
	static char salloc[] = "salloc";

	start(plain, 2);
	program_invocation_short_name = salloc;
	setenv("FLASHREC_HANDED_OVER", "1", 1);
	setenv("FLASHREC_PLUGIN", "1", 1);
	setenv("FLASHREC_NO_KILL", "1", 1);
	fake.option.cb(0, "spares=1", 0);
	CHECK(flashrec_allocator_post_opt(NULL, &args) == 0);
	CHECK_TEXT(getenv("FLASHREC_NO_KILL"), "1");
	CHECK_TEXT(getenv("FLASHREC_HANDED_OVER"), "1");
	CHECK(!getenv("FLASHREC_SPEC") && fake.kept.count == 0);
	/* a user's own */
	unsetenv("FLASHREC_HANDED_OVER");
	CHECK(flashrec_allocator_post_opt(NULL, &args) == 0);
	CHECK_TEXT(getenv("FLASHREC_SPEC"), "spares=1");
	program_invocation_short_name = before;
}

int main(void)
{
	test_salloc_of_flashrec_is_left_alone();
	test_without_the_option_nothing_is_exported();
	test_option_is_exported();
	test_filter_that_adds_no_kill();
	test_other_jobs_variables_do_not_stay();
	test_users_own_variables_stay();
	test_line_that_cannot_be_told();
	test_wrong_argument_is_told_to_who_uses_the_option();
	test_called_twice();
	PASSED("allocator");
	return 0;
}
