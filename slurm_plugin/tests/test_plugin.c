/* The dispatcher: which part is meant in which place, and that a place that is not ours sees
 * nothing of us. */
#include <getopt.h>

#include "check.h"
#include "fake_spank.h"
#include "flashrec.h"

PROCESS_ENDS;

static char wrong[] = "colour=red", pool[] = "pool=night";
static char *arguments[] = {pool, wrong};

static void start(spank_context_t context)
{
	fake_reset();
	fake.context = context;
	unsetenv(FLASHREC_ENV_HANDED_OVER);
	unsetenv(FLASHREC_ENV_SPEC);
	CHECK(slurm_spank_init(NULL, 2, arguments) == 0);
}

static void test_option_is_there_where_options_are_read(void)
{
	static const spank_context_t WITH[] = {S_CTX_LOCAL, S_CTX_REMOTE, S_CTX_ALLOCATOR};
	static const spank_context_t WITHOUT[] = {S_CTX_SLURMD, S_CTX_JOB_SCRIPT, S_CTX_ERROR};

	for (int i = 0; i < 3; i++) {
		start(WITH[i]);
		CHECK(fake.num_registered == 1);
		CHECK_TEXT(fake.said, "");
		start(WITHOUT[i]);
		CHECK(fake.num_registered == 0);
	}
}

/* Another plugin may have an option of that name: srun goes on without ours. */
static void test_option_that_cannot_be_registered(void)
{
	fake_reset();
	fake.register_rc = ESPANK_BAD_ARG;
	CHECK(slurm_spank_init(NULL, 0, NULL) == 0);
	CHECK(slurm_spank_init_post_opt(NULL, 0, NULL) == 0);
	CHECK_TEXT(fake.said, "");
}

static void test_wrong_argument_is_in_slurmds_log(void)
{
	start(S_CTX_SLURMD);
	CHECK(strstr(fake.said, "colour=red"));
}

static void test_every_callback_in_every_place_without_the_option(void)
{
	for (spank_context_t context = S_CTX_ERROR; context <= S_CTX_JOB_SCRIPT; context++) {
		start(context);
		fake.said[0] = '\0';
		for (int twice = 0; twice < 2; twice++) {
			CHECK(slurm_spank_init_post_opt(NULL, 0, NULL) == 0);
			CHECK(slurm_spank_user_init(NULL, 0, NULL) == 0);
			CHECK(slurm_spank_task_exit(NULL, 0, NULL) == 0);
		}
		CHECK_TEXT(fake.said, "");
		CHECK(!fake.has_become && fake.exit_code == -1 && fake.job_env.count == 0);
		CHECK(!getenv(FLASHREC_ENV_SPEC));
	}
}

static void test_sbatch_exports(void)
{
	start(S_CTX_ALLOCATOR);
	CHECK(fake.option.cb(0, "spares=1", 0) == 0);
	CHECK(slurm_spank_init_post_opt(NULL, 0, NULL) == 0);
	CHECK_TEXT(getenv(FLASHREC_ENV_SPEC), "spares=1");
}

/* There it would have to be a job that is started, and in slurmstepd nothing is. */
static void test_slurmstepd_becomes_nothing(void)
{
	start(S_CTX_REMOTE);
	CHECK(fake.option.cb(0, "spares=1", 1) == 0);
	CHECK(slurm_spank_init_post_opt(NULL, 0, NULL) == 0);
	CHECK(!fake.has_become && fake.exit_code == -1);
}

static int post_opt(void)
{
	return slurm_spank_init_post_opt(NULL, 0, NULL);
}

static void test_srun_becomes_what_the_argument_says(void)
{
	static char missing[] = "flashrec=/nowhere/flashrec";
	static char *words[] = {missing};

	fake_reset();
	CHECK(slurm_spank_init(NULL, 1, words) == 0);
	CHECK(fake.option.cb(0, "spares=1", 0) == 0);
	optind = 1;
	CHECK(fake_run(post_opt) == 0);
	CHECK(fake.exit_code == 1);
}

int main(void)
{
	test_option_is_there_where_options_are_read();
	test_option_that_cannot_be_registered();
	test_wrong_argument_is_in_slurmds_log();
	test_every_callback_in_every_place_without_the_option();
	test_sbatch_exports();
	test_slurmstepd_becomes_nothing();
	test_srun_becomes_what_the_argument_says();
	PASSED("plugin");
	return 0;
}
