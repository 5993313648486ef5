/* The process that holds a Pod's namespaces: it sleeps, reaps what is re-parented to it when the Pod
 * shares one process namespace, and ends on the signals that stop a Pod. */
#include <signal.h>
#include <stddef.h>
#include <sys/types.h>
#include <sys/wait.h>

int main(void) {
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGTERM);
	if (sigprocmask(SIG_BLOCK, &set, NULL) != 0)
		return 1;
	for (;;) {
		int sig;
		if (sigwait(&set, &sig) != 0)
			return 1;
		if (sig != SIGCHLD)
			return 0;
		while (waitpid(-1, NULL, WNOHANG) > 0)
			;
	}
}
