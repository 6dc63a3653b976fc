/* What slurmstepd puts into the environment of a batch script and of our own tasks. */
#include "check.h"
#include "fake_spank.h"
#include "flashrec.h"

static char python[] = "python", m[] = "-m", launch[] = "flashrec.agent.launch", dashes[] = "--";
static char other[] = "flashrec.agent", train[] = "train.py";

static void start(char **argv)
{
	fake_reset();
	fake.context = S_CTX_REMOTE;
	fake.argv = argv;
	CHECK(flashrec_option_register(NULL) == ESPANK_SUCCESS);
}

static void keep(const char *name, const char *value)
{
	CHECK(spank_setenv(NULL, name, value, 1) == ESPANK_SUCCESS);
}

static void test_launcher_is_recognised(void)
{
	char *ours[] = {python, m, launch, dashes, train, NULL};
	char *not_ours[] = {python, m, other, dashes, train, NULL};
	char *users[] = {python, train, dashes, m, launch, NULL};
	char *cut[] = {python, m, NULL};
	int end;

	CHECK(flashrec_is_launcher(5, ours, &end) && end == 3);
	CHECK(!flashrec_is_launcher(5, not_ours, &end));
	CHECK(!flashrec_is_launcher(5, users, &end) && end == 2);
	CHECK(!flashrec_is_launcher(2, cut, &end));
	CHECK(!flashrec_is_launcher(0, NULL, &end) && end == 0);
}

/* However long the user's command line is, we look at its start alone. */
static void test_long_command_line(void)
{
	static char *words[1000];
	int end;

	for (int i = 0; i < 999; i++)
		words[i] = train;
	words[900] = m;
	words[901] = launch;
	CHECK(!flashrec_is_launcher(999, words, &end));
	CHECK(end <= 64);
}

static void test_tasks_of_ours_are_marked(void)
{
	char *ours[] = {python, m, launch, dashes, train, NULL};

	start(ours);
	fake.step = 3;
	CHECK(flashrec_task_env_user_init(NULL) == 0);
	CHECK_TEXT(fake_value(&fake.job_env, "FLASHREC_HANDED_OVER"), "1");
	CHECK(fake.job_env.count == 1);
}

static void test_other_tasks_are_left_alone(void)
{
	char *users[] = {python, train, NULL};

	start(users);
	fake.step = 3;
	keep("SLURM_SPANK_FLASHREC_SPEC", "spares=1");
	fake.option.cb(0, "spares=1", 1);
	CHECK(flashrec_task_env_user_init(NULL) == 0);
	CHECK(fake.job_env.count == 1);
}

static void test_batch_script_gets_what_sbatch_kept(void)
{
	char *script[] = {train, NULL};

	start(script);
	fake.step = SLURM_BATCH_SCRIPT;
	keep("SLURM_SPANK_FLASHREC_PLUGIN", "1");
	keep("SLURM_SPANK_FLASHREC_SPEC", "spares=1");
	keep("SLURM_SPANK_FLASHREC_SUBMIT_LINE", "sbatch --no-kill");
	keep("FLASHREC_PLUGIN", "passed on");
	fake.option.cb(0, "spares=1", 1);
	CHECK(flashrec_task_env_user_init(NULL) == 0);
	CHECK_TEXT(fake_value(&fake.job_env, "FLASHREC_SPEC"), "spares=1");
	CHECK_TEXT(fake_value(&fake.job_env, "FLASHREC_SUBMIT_LINE"), "sbatch --no-kill");
	CHECK_TEXT(fake_value(&fake.job_env, "FLASHREC_PLUGIN"), "passed on");
	CHECK(!fake_value(&fake.job_env, "FLASHREC_HANDED_OVER"));
	CHECK(!fake_value(&fake.job_env, "FLASHREC_NO_KILL"));
}

static void test_job_without_the_option_gets_nothing(void)
{
	char *script[] = {train, NULL};

	start(script);
	fake.step = SLURM_BATCH_SCRIPT;
	CHECK(flashrec_task_env_user_init(NULL) == 0);
	CHECK(fake.job_env.count == 0);
}

static void test_items_that_cannot_be_had(void)
{
	char *ours[] = {python, m, launch, NULL};

	start(ours);
	fake.option.cb(0, NULL, 1);
	fake.missing_item = S_JOB_STEPID;
	CHECK(flashrec_task_env_user_init(NULL) == 0);
	start(ours);
	fake.missing_item = S_JOB_ARGV;
	CHECK(flashrec_task_env_user_init(NULL) == 0);
	CHECK(fake.job_env.count == 0);
}

int main(void)
{
	test_launcher_is_recognised();
	test_long_command_line();
	test_tasks_of_ours_are_marked();
	test_other_tasks_are_left_alone();
	test_batch_script_gets_what_sbatch_kept();
	test_job_without_the_option_gets_nothing();
	test_items_that_cannot_be_had();
	PASSED("task_env");
	return 0;
}
