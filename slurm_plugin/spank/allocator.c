/*
 * In sbatch and salloc: tells the job what was asked. Their environment is the job's.
 *
 * The variables are those of one job. A job that was submitted from within another one does not
 * inherit them.
 */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cmdline.h"
#include "flashrec.h"

/* Linux starts no program with a variable of 128 KiB or more: stay far below. */
enum { MAX_SUBMIT_LINE = 16384 };

static const char *const OURS[] = {FLASHREC_ENV_PLUGIN, FLASHREC_ENV_SPEC, FLASHREC_ENV_SUBMIT_LINE,
				   FLASHREC_ENV_NO_KILL};

/* `flashrec run` outside an allocation, or for a spare node: it has said all there is to say. */
static bool is_flashrecs_own(void)
{
	return getenv(FLASHREC_ENV_HANDED_OVER) &&
	       strcmp(program_invocation_short_name, "salloc") == 0;
}

static void forget_other_job(void)
{
	bool are_ours = getenv(FLASHREC_ENV_PLUGIN) != NULL;

	for (size_t i = 0; i < sizeof(OURS) / sizeof(OURS[0]); i++) {
		char kept[64];

		snprintf(kept, sizeof(kept), FLASHREC_KEPT "%s", OURS[i]);
		unsetenv(kept);
		/* Without the plugin, users may have set them themselves. */
		if (are_ours)
			unsetenv(OURS[i]);
	}
	unsetenv(FLASHREC_ENV_HANDED_OVER);
}

/* Without the script or command and its words: whoever looks for --no-kill must not find theirs. */
static char *submit_line(void)
{
	struct flashrec_cmdline line;
	char *text;

	if (!flashrec_cmdline_read(&line))
		return NULL;
	text = flashrec_cmdline_join(&line, optind >= 1 && optind < line.argc ? optind : line.argc,
				     MAX_SUBMIT_LINE);
	flashrec_cmdline_free(&line);
	return text;
}

/* The second way reaches jobs that take no environment along (--export=NONE); see task_env.c. */
static void export(spank_t spank, const char *name, const char *value)
{
	setenv(name, value, 1);
	spank_job_control_setenv(spank, name, value, 1);
}

int flashrec_allocator_post_opt(spank_t spank, const struct flashrec_args *args)
{
	const struct flashrec_option *option = flashrec_option();
	char *line;

	if (is_flashrecs_own())
		return 0;
	forget_other_job();
	if (!option->is_given)
		return 0;
	if (args->wrong)
		slurm_error("flashrecovery: unknown argument in plugstack.conf, ignored: %s",
			    args->wrong);
	export(spank, FLASHREC_ENV_PLUGIN, FLASHREC_CONTRACT);
	export(spank, FLASHREC_ENV_SPEC, option->spec.text);
	/* Where a filter adds --no-kill, the command line does not have it. */
	if (args->filter_sets_no_kill && !option->spec.is_off)
		export(spank, FLASHREC_ENV_NO_KILL, "1");
	line = args->filter_sets_no_kill ? NULL : submit_line();
	if (line)
		export(spank, FLASHREC_ENV_SUBMIT_LINE, line);
	free(line);
	return 0;
}
