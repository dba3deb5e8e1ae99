#include "denied.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <future>
#include <thread>
#include <vector>

#include "ebb/offload/file_handle.h"

namespace ebb::testing {
namespace {

bool SetFilter(const Refusal& refusal) {
  std::vector<sock_filter> program = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(refusal.system_call), 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  if (refusal.argument >= 0) {
    const auto low_word = static_cast<unsigned>(
        offsetof(seccomp_data, args) + sizeof(uint64_t) * static_cast<size_t>(refusal.argument));
    program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, low_word));
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, refusal.bits, 1, 0));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  }
  program.push_back(
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(refusal.error)));
  const sock_fprog filter = {static_cast<unsigned short>(program.size()), program.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

// The descriptor that reports the calls, or -1.
int SetListener(int system_call) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(system_call), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter = {static_cast<unsigned short>(std::size(program)), program};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return -1;
  return static_cast<int>(
      syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &filter));
}

void AnswerOne(int listener, const Answer& answer) {
  seccomp_notif call = {};
  if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &call) != 0) return;  // a signal came first
  uint64_t arguments[6];
  std::copy(std::begin(call.data.args), std::end(call.data.args), arguments);
  const int error = answer(arguments);
  seccomp_notif_resp response = {};
  response.id = call.id;
  response.error = -error;
  response.flags = error == 0 ? SECCOMP_USER_NOTIF_FLAG_CONTINUE : 0;
  ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &response);
}

}  // namespace

bool RunRefused(Refusal refusal, const std::function<void()>& function) {
  bool set = false;
  std::thread([&] {
    set = SetFilter(refusal);
    if (set) function();
  }).join();
  return set;
}

bool RunAnswered(int system_call, const Answer& answer, const std::function<void()>& function) {
  const FileHandle over(eventfd(0, EFD_CLOEXEC));
  std::promise<int> made;
  std::thread runs([&] {
    const int descriptor = SetListener(system_call);
    made.set_value(descriptor);
    if (descriptor < 0) return;
    function();
    eventfd_write(over.get(), 1);
  });
  const FileHandle listener(made.get_future().get());
  pollfd waits[] = {{listener.get(), POLLIN, 0}, {over.get(), POLLIN, 0}};
  while (listener.is_open() && waits[1].revents == 0) {
    if (poll(waits, 2, /*milliseconds=*/-1) > 0 && waits[0].revents != 0)
      AnswerOne(listener.get(), answer);
  }
  runs.join();
  return listener.is_open();
}

}  // namespace ebb::testing
