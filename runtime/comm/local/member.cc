#include "ebb/runtime/comm/local/member.h"

#include <utility>

#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> LocalMember::Split(int colour, int key,
                                                                        std::string_view name) {
  CommunicatorOptions options = group_->options();
  options.reduction_group = 0;  // the parent's need not divide the parts
  if (!name.empty()) options.name = name;
  EBB_ASSIGN_OR_RETURN(
      Formation::Place place,
      group_->splits().Join(rank_, {.options = std::move(options), .colour = colour, .key = key}));
  return Join(std::move(place));
}

void LocalMember::Abort(absl::Status why) {
  world_->NoteFailure(world_rank());
  group_->Fail(AbortStatus(group_->options(), world_rank(), why));
}

}  // namespace ebb
