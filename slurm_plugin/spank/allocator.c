/*
 * In sbatch and salloc: tells the job what was asked. Their environment is the job's.
 *
 * The variables are those of one job. A job that was submitted from within another one does not
 * inherit them.
 */
#include <getopt.h>
#include <stdlib.h>

#include "cmdline.h"
#include "flashrec.h"

/* One variable must stay far below the 128 KiB that Linux allows, or the job could start no program
 * any more. */
enum { MAX_SUBMIT_LINE = 16384 };

static void forget_other_job(void)
{
	if (getenv(FLASHREC_ENV_PLUGIN)) {
		unsetenv(FLASHREC_ENV_SPEC);
		unsetenv(FLASHREC_ENV_SUBMIT_LINE);
		unsetenv(FLASHREC_ENV_PLUGIN);
	}
	unsetenv(FLASHREC_ENV_HANDED_OVER);
}

/* The command and its options, without script or command: whoever looks for --no-kill must not find
 * theirs. */
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

	forget_other_job();
	if (!option->is_given)
		return 0;
	if (args->wrong)
		slurm_error("flashrecovery: unknown argument in plugstack.conf, ignored: %s",
			    args->wrong);
	export(spank, FLASHREC_ENV_PLUGIN, FLASHREC_CONTRACT);
	export(spank, FLASHREC_ENV_SPEC, option->spec.text);
	line = submit_line();
	if (line)
		export(spank, FLASHREC_ENV_SUBMIT_LINE, line);
	else
		unsetenv(FLASHREC_ENV_SUBMIT_LINE); /* not known is not the same as empty */
	free(line);
	return 0;
}
