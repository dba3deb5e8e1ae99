#include "ebb/runtime/comm/local/member.h"

#include <utility>

#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> LocalMember::Split(int colour, int key,
                                                                        std::string_view name) {
  EBB_ASSIGN_OR_RETURN(
      Formation::Place place,
      group_->splits().Join(
          rank_, {.options = group_->options().OfPart(name), .colour = colour, .key = key}));
  return Join(std::move(place));
}

void LocalMember::Abort(absl::Status why) {
  world_->NoteFailure(world_rank());
  group_->Fail(AbortStatus(group_->options(), world_rank(), why));
}

}  // namespace ebb
