// How ranks of a group create communicators: they propose, in letters, and all that become
// members compute the same place; then they tell each other whether it has worked on their hosts.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/comm/mpi/group.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

struct ProposalLetter {
  static constexpr size_t kNameBytesMax = 120, kMessageBytesMax = 320;
  char name[kNameBytesMax];
  double timeout_seconds;
  int32_t reduction_group;
  int32_t colour;
  int32_t key;
  int32_t next_id;
  // Of the second letter: what has become of the first.
  int32_t code;
  char message[kMessageBytesMax];
};
static_assert(sizeof(ProposalLetter) <= MpiWorld::kProposalBytes);

template <size_t kBytes>
void WriteText(char (&to)[kBytes], absl::string_view text) {
  const size_t bytes = std::min(text.size(), kBytes - 1);
  std::copy_n(text.data(), bytes, to);
  to[bytes] = '\0';
}

using Packed = std::array<std::byte, MpiWorld::kProposalBytes>;

Packed Pack(const ProposalLetter& letter) {
  Packed packed = {};
  std::memcpy(packed.data(), &letter, sizeof(letter));
  return packed;
}

ProposalLetter Read(const void* from) {
  ProposalLetter letter;
  std::memcpy(&letter, from, sizeof(letter));
  return letter;
}

Proposal ProposalOf(const ProposalLetter& letter) {
  return {.options = {.name = letter.name,
                      .reduction_group = letter.reduction_group,
                      .timeout_seconds = letter.timeout_seconds},
          .colour = letter.colour,
          .key = letter.key};
}

}  // namespace

absl::StatusOr<MpiGroup::Place> MpiGroup::Join(const Proposal& proposal) {
  const CommunicatorOptions& wanted = proposal.options;
  const WaitPoint::Deadline deadline = DeadlineAfter(CreationSeconds(wanted));
  ProposalLetter mine = {};
  WriteText(mine.name, wanted.name);
  mine.timeout_seconds = wanted.timeout_seconds;
  mine.reduction_group = wanted.reduction_group;
  mine.colour = proposal.colour;
  mine.key = proposal.key;
  mine.next_id = world_.next_id();
  EBB_RETURN_IF_ERROR(MeetToJoin(Pack(mine).data(), wanted, deadline));
  std::vector<Proposal> proposals;
  Place place;
  for (int other = 0; other < size(); ++other) {
    const ProposalLetter letter = other == rank() ? mine : Read(proposals_->From(other));
    proposals.push_back(ProposalOf(letter));
    place.id = std::max(place.id, letter.next_id);
  }
  proposals_->Next(others_);
  EBB_ASSIGN_OR_RETURN(const auto groups, FormGroups(place_.world_ranks, proposals));
  const auto me = static_cast<size_t>(rank());
  for (const std::vector<size_t>& members : groups) {
    const auto found = std::find(members.begin(), members.end(), me);
    if (found == members.end()) continue;
    place.rank = static_cast<int>(found - members.begin());
    for (const size_t member : members) place.world_ranks.push_back(place_.world_ranks[member]);
  }
  place.options = proposals[me].options;
  place.options.notices = wanted.notices;
  world_.UseId(place.id);

  absl::Status made;
  if (kTags * (int64_t{place.id} + 1) > port().tag_max()) {
    made = absl::ResourceExhaustedError(absl::StrCat(
        "communicator '", wanted.name, "' is the ", place.id,
        "th of this world, for which this MPI has no tag (its largest is ", port().tag_max(), ")"));
  } else {
    // Sums that cross hosts are made of one partial a host, so those of a host have one group.
    CommunicatorOptions node_options = place.options;
    if (FindHosts(world_.HostsOf(place.world_ranks)).count() > 1) node_options.reduction_group = 0;
    absl::StatusOr<std::unique_ptr<NodeCommunicator>> node =
        place_.node->SplitNode(node_options, proposal.colour, place.rank);
    made = node.status();
    if (node.ok()) place.node = *std::move(node);
  }
  ProposalLetter outcome = {};
  outcome.code = static_cast<int32_t>(made.code());
  WriteText(outcome.message, made.message());
  EBB_RETURN_IF_ERROR(MeetToJoin(Pack(outcome).data(), wanted, deadline));
  for (const int other : others_) {
    const ProposalLetter letter = Read(proposals_->From(other));
    if (made.ok() && letter.code != 0)
      made = absl::Status(static_cast<absl::StatusCode>(letter.code), letter.message);
  }
  proposals_->Next(others_);
  EBB_RETURN_IF_ERROR(made);
  return place;
}

absl::Status MpiGroup::MeetToJoin(const void* letter, const CommunicatorOptions& options,
                                  WaitPoint::Deadline deadline) {
  const auto waits = [&](std::string_view names) { return WaitsForCreation(options, names); };
  const Letters::Meeting meeting = proposals_->Meet(
      others_, letter, deadline, [](int) { return true; }, [this] { return broken().ok(); },
      {.options = options, .kind = CollectiveKind::kBarrier, .text = waits});
  EBB_RETURN_IF_ERROR(status());
  EBB_RETURN_IF_ERROR(broken());
  switch (meeting.outcome) {
    case Letters::Outcome::kMet:
    case Letters::Outcome::kFailed:
      return absl::OkStatus();
    case Letters::Outcome::kLeft: {
      std::string how;
      {
        const std::scoped_lock lock(mutex_);
        how = farewells_[static_cast<size_t>(meeting.absent[0])]->how;
      }
      return Break(LeftBeforeCreationStatus(world_rank(meeting.absent[0]), how));
    }
    case Letters::Outcome::kLate:
      break;
  }
  std::string absent;
  for (const int other : meeting.absent)
    absl::StrAppend(&absent, absent.empty() ? "" : ", ", "rank ", world_rank(other));
  return Break(LateCreationStatus(options, absent));
}

absl::Status MpiGroup::Break(const absl::Status& why) {
  {
    const std::scoped_lock lock(mutex_);
    if (!broken_.ok()) return broken_;
    broken_ = why;
  }
  for (const int other : others_)
    world_.Tell(world_rank(other), Notice::Of(Notice::Kind::kBroken, id(), why));
  return why;
}

absl::Status MpiGroup::broken() const {
  const std::scoped_lock lock(mutex_);
  return broken_;
}

}  // namespace ebb
