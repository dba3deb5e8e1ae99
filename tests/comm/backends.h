// The ways of connecting ranks that the conformance suites are run over. Which they are, the program
// says that a suite is linked into.
#pragma once

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "../print_dtype.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/device.h"

namespace ebb::testing {

struct Backend {
  std::string name;
  // As RunThreads: `body` on every rank of a world, then the first error.
  std::function<absl::Status(int ranks, std::function<absl::Status(World)> body)> run;
  int many_ranks = 64;  // that it has to work with on a machine of two cores
  // What its operations run on; `threads`: of a CPU.
  std::function<Device(int threads)> device = [](int threads) { return Device::Cpu(threads); };
  // Sums have the order and the rounding of communicator.h. Otherwise only sums that are exact in
  // any order can be compared, multiplied and rounded once, and int8 is not summed.
  bool exact_order = true;
  // What the suite of sums gives to SumInOrder, in bytes. 0: it is not called.
  int64_t sum_scratch = 0;
};
inline void PrintTo(const Backend& backend, std::ostream* out) {
  *out << backend.name;
}

std::vector<Backend> Backends();

}  // namespace ebb::testing
