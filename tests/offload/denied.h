// A thread to which the system refuses something, as a container's seccomp profile would.
#pragma once

#include <functional>

namespace ebb::testing {

struct Refusal {
  int system_call = 0;
  int error = 0;
  // Refused only when `bits` of argument `argument` are set; -1: always.
  int argument = -1;
  unsigned bits = 0;
};

// Runs `function` in such a thread, to the end. False: no filter could be set.
bool RunRefused(Refusal refusal, const std::function<void()>& function);

}  // namespace ebb::testing
