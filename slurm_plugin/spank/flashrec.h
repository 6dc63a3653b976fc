/*
 * What the parts of the plugin know of each other. One part for each place that Slurm loads us in:
 *
 *     plugin.c     what Slurm calls, and which part is meant
 *     option.c     --flashrecovery: registered, checked, remembered
 *     handover.c   srun        becomes `flashrec run`
 *     allocator.c  sbatch, salloc  tell the job what was asked
 *     task_env.c   slurmstepd  the same for jobs whose environment is not passed on
 *     task_exit.c  slurmstepd  tells the agent how a task ended
 *
 * and beneath them, without Slurm: spec.c (the grammar), args.c (our words in plugstack.conf),
 * cmdline.c.
 *
 * Rules: a failure of our own is never one of the job or the node, so callbacks return 0; where the
 * user asked for recovery and cannot have it, srun says so and ends. Without the option nothing is
 * done and nothing printed. Nothing blocks.
 */
#ifndef FLASHREC_H
#define FLASHREC_H

#include <stdbool.h>
#include <stdint.h>

#include <slurm/spank.h>

#include "args.h"
#include "spec.h"

#define FLASHREC_ENV_HANDED_OVER "FLASHREC_HANDED_OVER"
#define FLASHREC_ENV_NO_KILL "FLASHREC_NO_KILL"
#define FLASHREC_ENV_PLUGIN "FLASHREC_PLUGIN"
#define FLASHREC_ENV_SPEC "FLASHREC_SPEC"
#define FLASHREC_ENV_SUBMIT_LINE "FLASHREC_SUBMIT_LINE"

/*
 * What sbatch and salloc keep for us under this name is in every job's environment, whatever
 * --export says.
 */
#define FLASHREC_KEPT "SLURM_SPANK_"

/* The version of the contract between the plugin and flashrec. */
#define FLASHREC_CONTRACT "1"

/* ---- option.c */

enum { FLASHREC_MAX_TYPED = 16 };

struct flashrec_option {
	bool is_given; /* here, or to the sbatch or salloc around us */
	bool is_typed; /* here, on the command line */
	struct flashrec_spec spec;
	int num_typed;
	int typed[FLASHREC_MAX_TYPED]; /* where in argv; srun alone needs it */
};

spank_err_t flashrec_option_register(spank_t spank);

/* What was asked, as far as options have been read. */
const struct flashrec_option *flashrec_option(void);

/* ---- one part for each place */

int flashrec_handover_post_opt(const struct flashrec_args *args);
int flashrec_allocator_post_opt(spank_t spank, const struct flashrec_args *args);
int flashrec_task_env_user_init(spank_t spank);
int flashrec_task_exit(spank_t spank);

/* ---- words of a job step's command line (task_env.c) */

/*
 * True if our launcher was started with these words; then its own options are argv[0] to
 * argv[*end - 1].
 */
bool flashrec_is_launcher(int argc, char **argv, int *end);

#endif
