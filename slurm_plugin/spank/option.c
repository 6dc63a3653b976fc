/*
 * --flashrecovery in all the places where Slurm reads options.
 *
 * Slurm calls us for the option inherited from sbatch or salloc (an environment variable) and then
 * for each one typed; the last one counts. A wrong one is refused where the user sees it, never in
 * slurmstepd.
 */
#include <getopt.h>
#include <string.h>

#include "flashrec.h"

static struct flashrec_option option;

const struct flashrec_option *flashrec_option(void)
{
	return &option;
}

/*
 * The option has an optional argument, so it is always one word of argv, and the one that getopt
 * has just read. getopt's variables are the process's own: an argument that is not getopt's comes
 * from the environment.
 */
static void remember_where(const char *argument)
{
	if (argument != optarg)
		return;
	option.is_typed = true;
	if (option.num_typed < FLASHREC_MAX_TYPED)
		option.typed[option.num_typed] = optind - 1;
	option.num_typed++;
}

static int on_option(int val, const char *argument, int remote)
{
	char reason[FLASHREC_REASON_MAX];
	const char *text = argument;

	(void)val;
	/* What Slurm makes of an option without argument when it hands it down. */
	if (!text || strcmp(text, "(null)") == 0)
		text = "";
	if (!flashrec_spec_parse(text, &option.spec, reason)) {
		if (remote)
			return 0;
		slurm_error("--flashrecovery: %s", reason);
		slurm_error("usage: %s", FLASHREC_SPEC_GRAMMAR);
		return -1;
	}
	option.is_given = true;
	if (!remote)
		remember_where(argument);
	return 0;
}

spank_err_t flashrec_option_register(spank_t spank)
{
	static char name[] = "flashrecovery", arginfo[] = "[SPEC]";
	static char usage[] =
	    "survive lost processes and nodes; SPEC is off, or some of spares=N "
	    "tier=hot|warm|pool pool=NAME max-swaps=N config=FILE, with commas between";
	static struct spank_option ours = {
	    .name = name,
	    .arginfo = arginfo,
	    .usage = usage,
	    .has_arg = optional_argument,
	    .val = 0,
	    .cb = on_option,
	};

	memset(&option, 0, sizeof(option));
	return spank_option_register(spank, &ours);
}
