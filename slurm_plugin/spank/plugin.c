/*
 * What Slurm calls. Each callback asks where we are and hands over to the part for that place; see
 * flashrec.h.
 */
#include "flashrec.h"

#include <slurm/slurm.h>

#define EXPORTED __attribute__((visibility("default")))

/*
 * Slurm loads no plugin that was built for another release; another one than the headers' is
 * for the tests.
 */
#ifndef FLASHREC_SLURM_VERSION
#define FLASHREC_SLURM_VERSION SLURM_VERSION_NUMBER
#endif

extern const char plugin_name[], plugin_type[], flashrec_contract[];
extern const unsigned int plugin_version, spank_plugin_version;
EXPORTED const char plugin_name[] = "flashrecovery";
EXPORTED const char plugin_type[] = "spank";
EXPORTED const unsigned int plugin_version = FLASHREC_SLURM_VERSION;
EXPORTED const unsigned int spank_plugin_version = 1;
/* For `flashrec doctor`, which reads it from the file. */
EXPORTED const char flashrec_contract[] = FLASHREC_CONTRACT;

static struct flashrec_args args;

EXPORTED int slurm_spank_init(spank_t spank, int argc, char **argv)
{
	args = flashrec_args_read(argc, argv);
	switch (spank_context()) {
	case S_CTX_LOCAL:
	case S_CTX_ALLOCATOR:
	case S_CTX_REMOTE:
		/*
		 * Without it the user is told that there is no such option, and all else goes
		 * on.
		 */
		if (flashrec_option_register(spank) != ESPANK_SUCCESS)
			slurm_verbose("flashrecovery: --flashrecovery could not be registered");
		break;
	case S_CTX_SLURMD:
		if (args.wrong)
			slurm_error(
			    "flashrecovery: unknown argument in plugstack.conf, ignored: %s",
			    args.wrong);
		break;
	case S_CTX_JOB_SCRIPT:
	case S_CTX_ERROR:
		break;
	}
	return 0;
}

EXPORTED int slurm_spank_init_post_opt(spank_t spank, int argc, char **argv)
{
	(void)argc;
	(void)argv;
	switch (spank_context()) {
	case S_CTX_LOCAL:
		return flashrec_handover_post_opt(&args);
	case S_CTX_ALLOCATOR:
		return flashrec_allocator_post_opt(spank, &args);
	default:
		return 0;
	}
}

EXPORTED int slurm_spank_user_init(spank_t spank, int argc, char **argv)
{
	(void)argc;
	(void)argv;
	return spank_context() == S_CTX_REMOTE ? flashrec_task_env_user_init(spank) : 0;
}

EXPORTED int slurm_spank_task_exit(spank_t spank, int argc, char **argv)
{
	(void)argc;
	(void)argv;
	return spank_context() == S_CTX_REMOTE ? flashrec_task_exit(spank) : 0;
}
