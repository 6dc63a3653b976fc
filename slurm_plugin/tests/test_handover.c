/* What srun becomes, for many command lines; and when it stays as it is, or ends. */
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdarg.h>
#include <unistd.h>

#include "check.h"
#include "fake_spank.h"
#include "flashrec.h"

PROCESS_ENDS;

enum { MAX_WORDS = 32 };

static char bin[] = "/tmp/flashrec-test-XXXXXX", executable[64];
static struct flashrec_args args;
static char *words[MAX_WORDS + 1];

/* Reads `line` as a shell without quotes would; "_" is the empty word. */
static int split(char *line)
{
	int count = 0;

	for (char *word; (word = strsep(&line, " ")) && count < MAX_WORDS;)
		words[count++] = strcmp(word, "_") == 0 ? word + 1 : word;
	words[count] = NULL;
	return count;
}

/*
 * As srun does: options are read up to `command`, and each word of them in `flags` (a bit for each
 * place) is ours. `inherited`: the SPEC of the job around, or NULL.
 */
static void start(char *line, int command, unsigned int flags, const char *inherited)
{
	fake_reset();
	split(line);
	fake.cmdline = words;
	memset(&args, 0, sizeof(args));
	args.executable = executable;
	unsetenv(FLASHREC_ENV_HANDED_OVER);
	unsetenv("SLURM_HET_SIZE");
	CHECK(flashrec_option_register(NULL) == ESPANK_SUCCESS);
	optarg = NULL;
	if (inherited)
		CHECK(fake.option.cb(0, inherited, 0) == 0);
	for (int i = 1; i < command; i++) {
		if (flags & (1U << i)) {
			char *value = strchr(words[i], '=');

			optarg = value ? value + 1 : NULL;
			optind = i + 1;
			CHECK(fake.option.cb(0, optarg, 0) == 0);
		}
	}
	optind = command;
	optarg = NULL;
}

static int hand_over(void)
{
	return flashrec_handover_post_opt(&args);
}

static void check_becomes(const char *wanted)
{
	char line[2048] = "";

	CHECK(fake_run(hand_over) == 0);
	if (!fake.has_become)
		fprintf(stderr, "said: %s\n", fake.said);
	CHECK(fake.has_become);
	CHECK_TEXT(fake.became_path, fake.became[0]);
	for (char **word = fake.became + 1; *word; word++) {
		strcat(line, **word ? *word : "_");
		strcat(line, word[1] ? " " : "");
	}
	CHECK_TEXT(line, wanted);
	CHECK_TEXT(getenv("FLASHREC_HANDED_OVER"), "1");
	CHECK_TEXT(getenv("FLASHREC_PLUGIN"), "1");
	CHECK_TEXT(fake.said, "");
}

static void check_stays(void)
{
	CHECK(fake_run(hand_over) == 0);
	CHECK(!fake.has_become && fake.exit_code == -1);
	CHECK_TEXT(fake.said, "");
	CHECK(!getenv(FLASHREC_ENV_HANDED_OVER) || getenv(FLASHREC_ENV_HANDED_OVER)[0]);
}

static void check_refused(const char *why)
{
	CHECK(fake_run(hand_over) == 0);
	CHECK(!fake.has_become);
	CHECK(fake.exit_code == 1);
	if (!strstr(fake.said, why))
		fprintf(stderr, "said: %s\n", fake.said);
	CHECK(strstr(fake.said, why));
	CHECK(strchr(fake.said, '\n') == fake.said + strlen(fake.said) - 1);
}

#define LINE(text) ((char[]){text})

static void test_what_srun_becomes(void)
{
	start(LINE("srun --flashrecovery hostname"), 2, 1U << 1, NULL);
	check_becomes("run --flashrecovery= -- hostname");

	start(LINE("srun -N2 --flashrecovery=spares=01 -n 4 train.py -n 1"), 5, 1U << 2, NULL);
	check_becomes("run --flashrecovery=spares=1 -N2 -n 4 -- train.py -n 1");

	/* abbreviated as getopt allows it */
	start(LINE("srun --flash=tier=pool -N2 a"), 3, 1U << 1, NULL);
	check_becomes("run --flashrecovery=tier=pool -N2 -- a");

	/* the last one counts, and none is passed on */
	start(LINE("srun --flashrecovery=off --flashrecovery=spares=2 a"), 3, 1U << 1 | 1U << 2,
	      NULL);
	check_becomes("run --flashrecovery=spares=2 -- a");

	start(LINE("/usr/bin/srun --flashrecovery -- a -- b"), 3, 1U << 1, NULL);
	check_becomes("run --flashrecovery= -- a -- b");
}

static void test_words_of_others_are_kept(void)
{
	/* an option's argument, not ours */
	start(LINE("srun --comment --flashrecovery --flashrecovery a"), 4, 1U << 3, NULL);
	check_becomes("run --flashrecovery= --comment --flashrecovery -- a");

	/* the command's */
	start(LINE("srun --flashrecovery sh --flashrecovery=off _ x"), 2, 1U << 1, NULL);
	check_becomes("run --flashrecovery= -- sh --flashrecovery=off _ x");

	start(LINE("srun --flashrecovery -J _ a"), 4, 1U << 1, NULL);
	check_becomes("run --flashrecovery= -J _ -- a");
}

static void test_inherited(void)
{
	start(LINE("srun -N2 a"), 2, 0, "spares=1");
	check_becomes("run --flashrecovery=spares=1 -N2 -- a");

	start(LINE("srun a"), 1, 0, "(null)");
	check_becomes("run --flashrecovery= -- a");

	start(LINE("srun --flashrecovery=pool=x a"), 2, 1U << 1, "spares=1");
	check_becomes("run --flashrecovery=pool=x -- a");
}

static void test_what_stays_an_ordinary_srun(void)
{
	start(LINE("srun -N2 a"), 2, 0, NULL);
	check_stays();

	start(LINE("srun --flashrecovery=off a"), 2, 1U << 1, NULL);
	check_stays();

	start(LINE("srun --flashrecovery=off a"), 2, 1U << 1, "spares=1");
	check_stays();

	start(LINE("srun a"), 1, 0, "off");
	check_stays();

	/* srun says itself that there is no command */
	start(LINE("srun --flashrecovery -N2"), 3, 1U << 1, NULL);
	check_stays();

	/* the shell of a salloc */
	start(LINE("srun --interactive --preserve-env --pty bash"), 4, 0, "spares=1");
	check_stays();

	/* ours already; even a line that we could not hand over */
	start(LINE("srun --flashrecovery a : b"), 2, 1U << 1, NULL);
	setenv(FLASHREC_ENV_HANDED_OVER, "1", 1);
	check_stays();
}

static void test_called_twice(void)
{
	start(LINE("srun --interactive --preserve-env --pty bash"), 4, 0, "spares=1");
	check_stays();
	check_stays();
}

/* Of a heterogeneous salloc, too: its shell must start. */
static void test_shell_of_heterogeneous_salloc(void)
{
	start(LINE("srun --interactive --preserve-env --pty bash"), 4, 0, "spares=1");
	setenv("SLURM_HET_SIZE", "2", 1);
	check_stays();
}

static void test_interactive_if_asked_here(void)
{
	start(LINE("srun --interactive --flashrecovery bash"), 3, 1U << 2, NULL);
	check_becomes("run --flashrecovery= --interactive -- bash");
	start(LINE("srun sh --interactive"), 1, 0, "spares=1");
	check_becomes("run --flashrecovery=spares=1 -- sh --interactive");
}

static void test_empty_guard_is_none(void)
{
	start(LINE("srun --flashrecovery a"), 2, 1U << 1, NULL);
	setenv(FLASHREC_ENV_HANDED_OVER, "", 1);
	check_becomes("run --flashrecovery= -- a");
}

static void test_heterogeneous_is_refused(void)
{
	start(LINE("srun --flashrecovery a : b"), 2, 1U << 1, NULL);
	check_refused("heterogeneous");
	start(LINE("srun a : --flashrecovery b"), 1, 0, "spares=1");
	check_refused("heterogeneous");
	/* of the second component: getopt counts from its colon */
	start(LINE("srun a : --flashrecovery -N2 -n2 b"), 4, 1U << 1, NULL);
	check_refused("heterogeneous");
	start(LINE("srun --flashrecovery a"), 2, 1U << 1, NULL);
	setenv("SLURM_HET_SIZE", "2", 1);
	check_refused("heterogeneous");
}

static void test_command_line_that_is_not_as_getopt_said(void)
{
	start(LINE("srun --flashrecovery a"), 2, 1U << 1, NULL);
	optind = 7;
	check_refused("not as expected");
	start(LINE("srun --flashrecovery a"), 2, 1U << 1, NULL);
	optind = 0;
	check_refused("not as expected");
	start(LINE("srun --flashrecovery a"), 2, 1U << 1, NULL);
	words[1] = words[2];
	check_refused("not as expected");
	start(LINE("srun --flashrecovery a"), 2, 1U << 1, NULL);
	words[1] = (char[]){"--"};
	check_refused("not as expected");
	start(LINE("srun --f --f --f --f --f --f --f --f --f --f --f --f --f --f --f --f a"), 17,
	      0x1fffe, NULL);
	check_becomes("run --flashrecovery= -- a");
	start(LINE("srun --f --f --f --f --f --f --f --f --f --f --f --f --f --f --f --f --f a"),
	      18, 0x3fffe, NULL);
	check_refused("not as expected");
	start(LINE("srun --flashrecovery a"), 2, 1U << 1, NULL);
	fake.cmdline = NULL;
	check_refused("cannot be read");
}

static void test_executable(void)
{
	char missing[] = "/nowhere/flashrec", folder[] = "/tmp";

	start(LINE("srun --flashrecovery a"), 2, 1U << 1, NULL);
	args.executable = missing;
	check_refused("/nowhere/flashrec");
	start(LINE("srun --flashrecovery a"), 2, 1U << 1, NULL);
	args.executable = folder;
	check_refused("/tmp");
	start(LINE("srun --flashrecovery a"), 2, 1U << 1, NULL);
	fake.execv_errno = ENOEXEC;
	check_refused("Exec format error");
}

static void test_path(void)
{
	char path[256];

	snprintf(path, sizeof(path), "/nowhere::/usr/nothing:%s", bin);
	setenv("PATH", path, 1);
	start(LINE("srun --flashrecovery a"), 2, 1U << 1, NULL);
	args.executable = NULL;
	check_becomes("run --flashrecovery= -- a");
	CHECK_TEXT(fake.became_path, executable);

	/* nor an empty one */
	CHECK(chdir(bin) == 0);
	for (int i = 0; i < 4; i++) {
		setenv("PATH", ((const char *[]){"", ":", ":/nowhere:", "."})[i], 1);
		start(LINE("srun --flashrecovery a"), 2, 1U << 1, NULL);
		args.executable = NULL;
		check_refused("no flashrec in PATH");
	}
	unsetenv("PATH");
	start(LINE("srun --flashrecovery a"), 2, 1U << 1, NULL);
	args.executable = NULL;
	check_refused("no flashrec in PATH");
	CHECK(chdir("/") == 0);
}

/* srun blocks signals before it loads us. */
static void test_signals_are_not_blocked(void)
{
	sigset_t some;

	sigemptyset(&some);
	sigaddset(&some, SIGINT);
	sigaddset(&some, SIGTERM);
	sigaddset(&some, SIGUSR1);
	sigprocmask(SIG_BLOCK, &some, NULL);
	start(LINE("srun --flashrecovery a"), 2, 1U << 1, NULL);
	check_becomes("run --flashrecovery= -- a");
	CHECK(!sigismember(&fake.blocked, SIGINT) && !sigismember(&fake.blocked, SIGTERM));
	CHECK(!sigismember(&fake.blocked, SIGUSR1));
}

static void test_wrong_argument_is_told_once_and_does_not_matter(void)
{
	start(LINE("srun a"), 1, 0, NULL);
	args.wrong = "colour=red";
	check_stays();
	start(LINE("srun --flashrecovery a"), 2, 1U << 1, NULL);
	args.wrong = "colour=red";
	CHECK(fake_run(hand_over) == 0);
	CHECK(fake.has_become);
	CHECK(strstr(fake.said, "colour=red"));
}

int main(void)
{
	FILE *file;

	CHECK(mkdtemp(bin));
	snprintf(executable, sizeof(executable), "%s/flashrec", bin);
	file = fopen(executable, "w");
	CHECK(file && fclose(file) == 0 && chmod(executable, 0755) == 0);

	test_what_srun_becomes();
	test_words_of_others_are_kept();
	test_inherited();
	test_what_stays_an_ordinary_srun();
	test_called_twice();
	test_shell_of_heterogeneous_salloc();
	test_interactive_if_asked_here();
	test_empty_guard_is_none();
	test_heterogeneous_is_refused();
	test_command_line_that_is_not_as_getopt_said();
	test_executable();
	test_path();
	test_signals_are_not_blocked();
	test_wrong_argument_is_told_once_and_does_not_matter();
	CHECK(unlink(executable) == 0 && rmdir(bin) == 0);
	PASSED("handover");
	return 0;
}
