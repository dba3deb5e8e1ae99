#include "ebb/runtime/engine/state/mesh_copy.h"

#include <algorithm>
#include <map>
#include <string_view>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/sharding/copy_plan.h"
#include "ebb/sharding/split.h"

namespace ebb {

bool AreCutAlike(const ModelSpec& source, const ModelSpec& destination) {
  std::map<std::string_view, const ParameterSpec*> by_name;
  for (const ParameterSpec& parameter : source.parameters) by_name[parameter.name] = &parameter;
  const auto ranks = [](const ParameterSpec& parameter) {
    return parameter.block ? parameter.block->ranks : 1;
  };
  return std::all_of(destination.parameters.begin(), destination.parameters.end(),
                     [&](const ParameterSpec& parameter) {
                       const auto found = by_name.find(parameter.name);
                       return found == by_name.end() ||  // an error of both copies
                              (ranks(*found->second) == ranks(parameter) &&
                               (!parameter.block || found->second->split == parameter.split));
                     });
}

absl::Status MeshCopy::Prepare() {
  EBB_ASSIGN_OR_RETURN(from_, sharding::MatchByName(source_.model(), destination_.model()));
  return absl::OkStatus();
}

absl::Status MeshCopy::Run() {
  absl::Status status;
  for (size_t to = 0; to < from_.size(); ++to)
    status.Update(Copy(from_[to], static_cast<ParameterId>(to)));
  return status;
}

absl::Status MeshCopy::Copy(ParameterId from, ParameterId to) {
  const ParameterSpec& parameter = destination_.model()[to];
  EBB_ASSIGN_OR_RETURN(const StateAccess::Found found,
                       destination_.Find(to, {StateClass::kMaster}));
  std::vector<float> own(static_cast<size_t>(found.end - found.begin), 0);
  const auto take = [&](const Slice& piece, std::span<const float> values) {
    TakeOfWhole(parameter, piece.begin, values, found.begin, own);
    return absl::OkStatus();
  };
  EBB_RETURN_IF_ERROR(source_.Gather(from, {StateClass::kMaster}, /*scale=*/1, /*root=*/-1, take));
  // Slices come in the order of this rank's elements.
  size_t next = 0;
  return destination_.Write(
      to, {StateClass::kMaster}, /*scale=*/1, [&](const Slice&, std::span<float> values) {
        std::copy_n(own.begin() + static_cast<int64_t>(next), values.size(), values.begin());
        next += values.size();
        return absl::OkStatus();
      });
}

}  // namespace ebb
