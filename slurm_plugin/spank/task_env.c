/*
 * In slurmstepd, before tasks start: what they must know even if the user passes no environment on
 * (--export=NONE).
 *
 * The batch script gets what sbatch exported; Slurm keeps that for us under names of its own. The
 * tasks of our own job steps get the mark that keeps an srun inside them an ordinary one.
 */
#include <string.h>

#include <slurm/slurm.h>

#include "flashrec.h"

enum { MAX_LAUNCHER_WORDS = 64, MAX_VALUE = 32768 };

bool flashrec_is_launcher(int argc, char **argv, int *end)
{
	int at = 0, limit = argc < MAX_LAUNCHER_WORDS ? argc : MAX_LAUNCHER_WORDS;

	while (at < limit && argv[at] && strcmp(argv[at], "--") != 0)
		at++;
	*end = at;
	for (int i = 0; i + 1 < at; i++)
		if (strcmp(argv[i], "-m") == 0 && strcmp(argv[i + 1], "flashrec.agent.launch") == 0)
			return true;
	return false;
}

static void restore(spank_t spank, const char *kept, const char *name)
{
	static char value[MAX_VALUE];

	if (spank_getenv(spank, kept, value, sizeof(value)) == ESPANK_SUCCESS)
		spank_setenv(spank, name, value, 0);
}

static bool is_batch_script(spank_t spank)
{
	uint32_t step;

	return spank_get_item(spank, S_JOB_STEPID, &step) == ESPANK_SUCCESS &&
	       step == SLURM_BATCH_SCRIPT;
}

static bool is_ours(spank_t spank)
{
	char **argv;
	int argc, end;

	return spank_get_item(spank, S_JOB_ARGV, &argc, &argv) == ESPANK_SUCCESS &&
	       flashrec_is_launcher(argc, argv, &end);
}

int flashrec_task_env_user_init(spank_t spank)
{
	if (is_batch_script(spank)) {
		restore(spank, FLASHREC_KEPT FLASHREC_ENV_PLUGIN, FLASHREC_ENV_PLUGIN);
		restore(spank, FLASHREC_KEPT FLASHREC_ENV_SPEC, FLASHREC_ENV_SPEC);
		restore(spank, FLASHREC_KEPT FLASHREC_ENV_SUBMIT_LINE, FLASHREC_ENV_SUBMIT_LINE);
		restore(spank, FLASHREC_KEPT FLASHREC_ENV_NO_KILL, FLASHREC_ENV_NO_KILL);
	}
	if (is_ours(spank))
		spank_setenv(spank, FLASHREC_ENV_HANDED_OVER, "1", 1);
	return 0;
}
