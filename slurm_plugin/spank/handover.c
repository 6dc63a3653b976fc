/*
 * In srun: becomes `flashrec run --flashrecovery=SPEC [srun's options] -- COMMAND...`.
 *
 * That happens when srun has read its options and done nothing else yet. Its standard files,
 * folder, limits and process id stay; from then on srun is gone. Whoever asked for recovery and
 * cannot have it gets one line and exit code 1, because going on without would be found out too
 * late.
 */
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cmdline.h"
#include "flashrec.h"

enum { EXIT_REFUSED = 1, MAX_PATH = 4096 };

static void refuse(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

/*
 * A returned error would not end an srun with `optional` in plugstack.conf, and Slurm's own
 * end would call us again.
 */
static void refuse(const char *format, ...)
{
	char text[1024];
	va_list words;

	va_start(words, format);
	vsnprintf(text, sizeof(text), format, words);
	va_end(words);
	slurm_error("--flashrecovery: %s", text);
	fflush(NULL);
	_exit(EXIT_REFUSED);
}

static bool is_executable(const char *path)
{
	struct stat found;

	return stat(path, &found) == 0 && S_ISREG(found.st_mode) && access(path, X_OK) == 0;
}

/*
 * The first executable `flashrec` of PATH. Entries that mean another folder wherever we are do not
 * count.
 */
static const char *find_in_path(char found[MAX_PATH])
{
	const char *at = getenv("PATH");

	while (at && *at) {
		size_t length = strcspn(at, ":");

		if (at[0] == '/' && length + sizeof("/flashrec") <= MAX_PATH) {
			snprintf(found, MAX_PATH, "%.*s/flashrec", (int)length, at);
			if (is_executable(found))
				return found;
		}
		at += length + (at[length] == ':');
	}
	return NULL;
}

static const char *find_executable(const struct flashrec_args *args, char found[MAX_PATH])
{
	if (args->executable && !is_executable(args->executable))
		refuse("there is no program %s on this machine, which flashrec= in plugstack.conf "
		       "names; install flashrec there, or leave the option out",
		       args->executable);
	if (args->executable)
		return args->executable;
	if (!find_in_path(found))
		refuse(
		    "there is no flashrec in PATH; install it (pip install flashrec) and load its "
		    "environment, or leave the option out");
	return found;
}

static bool is_ours(const struct flashrec_option *option, int index)
{
	for (int i = 0; i < option->num_typed; i++)
		if (option->typed[i] == index)
			return true;
	return false;
}

/*
 * What was typed must be where getopt said, or the command line is not the one that srun has
 * read.
 */
static bool is_plausible(const struct flashrec_option *option, const struct flashrec_cmdline *line,
			 int command)
{
	if (command < 1 || command > line->argc || option->num_typed > FLASHREC_MAX_TYPED)
		return false;
	for (int i = 0; i < option->num_typed; i++) {
		int at = option->typed[i];
		size_t length = at >= 1 && at < command ? strcspn(line->argv[at], "=") : 0;

		/* It may be abbreviated. */
		if (length < 3 || strncmp(line->argv[at], "--flashrecovery", length) != 0)
			return false;
	}
	return true;
}

static bool has_word(const struct flashrec_cmdline *line, int from, int to, const char *word)
{
	for (int i = from; i < to; i++)
		if (strcmp(line->argv[i], word) == 0)
			return true;
	return false;
}

/*
 * `command`: where it begins. The `--` that may stand before it is not passed on, ours takes
 * its place.
 */
static char **build_argv(const struct flashrec_option *option, const struct flashrec_cmdline *line,
			 int command, char *executable)
{
	static char verb[] = "run", dashes[] = "--";
	static char spec[sizeof("--flashrecovery=") + FLASHREC_SPEC_MAX];
	char **argv = calloc((size_t)line->argc + 5, sizeof(argv[0]));
	int end = command, used = 0;

	if (!argv)
		return NULL;
	if (strcmp(line->argv[command - 1], dashes) == 0)
		end--;
	snprintf(spec, sizeof(spec), "--flashrecovery=%s", option->spec.text);
	argv[used++] = executable;
	argv[used++] = verb;
	argv[used++] = spec;
	for (int i = 1; i < end; i++)
		if (!is_ours(option, i))
			argv[used++] = line->argv[i];
	argv[used++] = dashes;
	for (int i = command; i < line->argc; i++)
		argv[used++] = line->argv[i];
	return argv;
}

/*
 * srun blocks the signals that it means to handle itself before it loads us; they would stay
 * blocked for ever.
 */
static void unblock_signals(void)
{
	sigset_t none;

	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

static void become(const struct flashrec_args *args, const struct flashrec_option *option,
		   const struct flashrec_cmdline *line, int command) __attribute__((noreturn));

static void become(const struct flashrec_args *args, const struct flashrec_option *option,
		   const struct flashrec_cmdline *line, int command)
{
	char found[MAX_PATH];
	char *executable = strdup(find_executable(args, found));
	char **argv = executable ? build_argv(option, line, command, executable) : NULL;

	if (!argv || setenv(FLASHREC_ENV_HANDED_OVER, "1", 1) != 0 ||
	    setenv(FLASHREC_ENV_PLUGIN, FLASHREC_CONTRACT, 1) != 0)
		refuse("out of memory");
	unblock_signals();
	execv(executable, argv);
	refuse("cannot run %s: %s", executable, strerror(errno));
}

static bool is_wanted(const struct flashrec_option *option)
{
	const char *guard = getenv(FLASHREC_ENV_HANDED_OVER);

	return option->is_given && !option->spec.is_off && !(guard && *guard);
}

/* srun has to say itself that there is no command. The shell that salloc starts is none of ours. */
static bool is_left_alone(const struct flashrec_option *option, const struct flashrec_cmdline *line,
			  int command)
{
	return command == line->argc || (command < line->argc && !option->is_typed &&
					 has_word(line, 1, command, "--interactive"));
}

int flashrec_handover_post_opt(const struct flashrec_args *args)
{
	const struct flashrec_option *option = flashrec_option();
	struct flashrec_cmdline line;
	int command = optind;

	if (!is_wanted(option))
		return 0;
	if (!flashrec_cmdline_read(&line))
		refuse("srun's command line cannot be read (/proc/self/cmdline): %s",
		       strerror(errno));
	if (is_left_alone(option, &line, command)) {
		flashrec_cmdline_free(&line);
		return 0;
	}
	/* Anywhere: the option may be that of a later component, where getopt counts anew. */
	if (getenv("SLURM_HET_SIZE") || has_word(&line, 1, line.argc, ":"))
		refuse("heterogeneous jobs and job steps (\":\" between commands) are not "
		       "supported; leave the option out");
	if (!is_plausible(option, &line, command))
		refuse("srun's command line is not as expected; please report it. Start the job "
		       "with `flashrec run` instead");
	if (args->wrong)
		slurm_error("flashrecovery: unknown argument in plugstack.conf, ignored: %s",
			    args->wrong);
	become(args, option, &line, command);
}
