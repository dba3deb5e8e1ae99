// Parameters of one engine into another of the same world that is cut over other tensor ranks, or in
// another way. Each parameter is gathered in pieces on all ranks, and each rank keeps what it has of
// it. So a rank receives the whole model once, and holds its own slice of one parameter in fp32.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/engine/state/state_access.h"
#include "ebb/sharding/model.h"

namespace ebb {

// Whether the destination's parameters are cut as the source's of the same names are.
bool AreCutAlike(const ModelSpec& source, const ModelSpec& destination);

class MeshCopy {
 public:
  MeshCopy(StateAccess& source, StateAccess& destination)
      : source_(source), destination_(destination) {}

  // The error of names or shapes that do not match.
  absl::Status Prepare();
  // Collective, once all ranks have prepared. Writes masters and what is cast from them.
  absl::Status Run();

 private:
  absl::Status Copy(ParameterId from, ParameterId to);

  StateAccess& source_;
  StateAccess& destination_;
  std::vector<ParameterId> from_;  // by parameter of the destination
};

}  // namespace ebb
