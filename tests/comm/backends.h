// The ways of connecting ranks that the conformance suites are run over. A backend joins by a line
// here.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ebb/runtime/comm/world.h"

namespace ebb::testing {

struct Backend {
  std::string name;
  // As RunThreads: `body` on every rank of a world, then the first error.
  std::function<absl::Status(int ranks, std::function<absl::Status(World)> body)> run;
};

inline std::vector<Backend> Backends() {
  return {{"local", RunThreads}};
}

}  // namespace ebb::testing
