// The ways of connecting ranks for the conformance suites. The program that links a suite defines
// them.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "../print_dtype.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/device.h"
#include "tests/status.h"

namespace ebb::testing {

struct Backend {
  std::string name;
  // Runs `body` on every rank of a world, like RunThreads, and returns the first error.
  std::function<absl::Status(int ranks, std::function<absl::Status(World)> body)> run;
  int many_ranks = 64;  // with so many it must work on a machine of two cores
  // The device of its operations. `threads`: of a CPU.
  std::function<Device(int threads)> device = [](int threads) { return Device::Cpu(threads); };
  // Sums have the order and the rounding of communicator.h. If false, only sums that are exact in
  // any order can be compared, multiplied and rounded once, and int8 is not summed.
  bool exact_order = true;
  // A communicator that fails ends the others of its world.
  bool fails_as_a_whole = false;
  // Lines about waits name the hosts of the ranks.
  bool names_hosts = false;
  // The bytes that the suite of sums gives to SumInOrder. 0: it is not called.
  int64_t sum_scratch = 0;
};
inline void PrintTo(const Backend& backend, std::ostream* out) {
  *out << backend.name;
}

std::vector<Backend> Backends();

// A suite with a test for each of Backends().
class OnEveryBackend : public ::testing::TestWithParam<Backend> {
 protected:
  // Fails the test where `body` returns an error on a rank.
  static void Run(int ranks, std::function<absl::Status(World)> body) {
    EXPECT_OK(GetParam().run(ranks, std::move(body)));
  }
  static Stream CallerStream() { return GetParam().device(1).CallerStream(); }
  static absl::StatusOr<Stream> NewStream(const char* name = "comm") {
    return GetParam().device(1).NewStream(name);
  }
};
inline std::string NameOf(const ::testing::TestParamInfo<Backend>& test) {
  return test.param.name;
}

}  // namespace ebb::testing
