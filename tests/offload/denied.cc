#include "denied.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>

#include <cstddef>
#include <thread>
#include <vector>

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

}  // namespace

bool RunRefused(Refusal refusal, const std::function<void()>& function) {
  bool set = false;
  std::thread([&] {
    set = SetFilter(refusal);
    if (set) function();
  }).join();
  return set;
}

}  // namespace ebb::testing
