#include "engine_creation.h"

#include <gtest/gtest.h>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/engine.h"
#include "tests/engine/toy_model.h"
#include "tests/status.h"

namespace ebb::testing {

std::vector<absl::Status> CreationOnAll(int ranks, const Config& config) {
  std::vector<absl::Status> said(static_cast<size_t>(ranks));
  ExpectOk(RunThreads(ranks, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
    said[static_cast<size_t>(world.rank())] =
        Engine::Create(world, device, ToyModel(ToyOptions()).spec(), config).status();
    return absl::OkStatus();
  }));
  return said;
}

std::vector<absl::Status> RefusalsOfAll(int ranks, const Config& config) {
  std::vector<absl::Status> said = CreationOnAll(ranks, config);
  for (const absl::Status& each : said) EXPECT_FALSE(each.ok());
  return said;
}

}  // namespace ebb::testing
