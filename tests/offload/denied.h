// A thread to which the system refuses a call, as a container's seccomp profile would.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

namespace ebb::testing {

struct Refusal {
  int system_call = 0;
  int error = 0;
  // Refused only if `bits` of argument `argument` are set; -1: always.
  int argument = -1;
  unsigned bits = 0;
};

// Runs `function` in such a thread, and waits for its end. False: no filter could be set.
bool RunRefused(Refusal refusal, const std::function<void()>& function);

// Runs `function` in a thread, and waits for its end. When the function, or a thread that it
// starts, makes the system call, `answer` runs first, on the caller's thread, with the arguments.
// 0: the system makes the call; otherwise it fails with this errno. False: no filter could be set.
using Answer = std::function<int(std::span<const uint64_t, 6> arguments)>;
bool RunAnswered(int system_call, const Answer& answer, const std::function<void()>& function);

}  // namespace ebb::testing
