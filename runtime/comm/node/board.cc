#include "ebb/runtime/comm/node/board.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/comm/node/world.h"
#include "ebb/runtime/comm/wait_notice.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb::node {
namespace {

constexpr int kPoint = 0;

template <size_t kBytes>
void WriteText(char (&to)[kBytes], absl::string_view text) {
  const size_t bytes = std::min(text.size(), kBytes - 1);
  std::copy_n(text.data(), bytes, to);
  to[bytes] = '\0';
}

void Write(const Proposal& proposal, SharedProposal& to) {
  WriteText(to.name, proposal.options.name);
  to.reduction_group = proposal.options.reduction_group;
  to.timeout_seconds = proposal.options.timeout_seconds;
  to.colour = proposal.colour;
  to.key = proposal.key;
}

Proposal Read(const SharedProposal& from) {
  return {.options = {.name = std::string(from.name, strnlen(from.name, kNameBytesMax)),
                      .reduction_group = from.reduction_group,
                      .timeout_seconds = from.timeout_seconds},
          .colour = from.colour,
          .key = from.key};
}

}  // namespace

void SayFarewell(Farewell& farewell, const std::string& how) {
  if (farewell.left.load(std::memory_order_relaxed) != 0) return;
  WriteText(farewell.how, how);
  farewell.left.store(1, std::memory_order_seq_cst);
}

Board::Board(NodeWorld& world, std::vector<int> world_ranks, int rank, BoardSeat* seats,
             SharedStatus* broken, std::function<absl::Status()> failure,
             std::function<const Farewell*(int rank)> farewell)
    : world_(world),
      world_ranks_(std::move(world_ranks)),
      rank_(rank),
      seats_(seats),
      broken_(broken),
      failure_(std::move(failure)),
      farewell_(std::move(farewell)) {}

absl::StatusOr<Board::Place> Board::Join(const Proposal& proposal) {
  BoardSeat& mine = seats_[rank_];
  const int64_t round = mine.joined.load(std::memory_order_relaxed) + 1;
  const auto half = static_cast<size_t>(round % 2);
  std::vector<int> all(world_ranks_.size());
  std::iota(all.begin(), all.end(), 0);
  Write(proposal, mine.proposals[half]);
  mine.joined.store(round, std::memory_order_seq_cst);
  Wake(all);
  const CommunicatorOptions& options = proposal.options;
  EBB_RETURN_IF_ERROR(
      AwaitAll(round, options, all, [](const BoardSeat& seat) { return seat.joined.load(); }));

  std::vector<Proposal> proposals;
  for (const int rank : all) proposals.push_back(Read(seats_[rank].proposals[half]));
  EBB_ASSIGN_OR_RETURN(const auto groups, FormGroups(world_ranks_, proposals));
  const auto me = static_cast<size_t>(rank_);
  const std::vector<size_t>& members =
      *std::find_if(groups.begin(), groups.end(), [&](const std::vector<size_t>& group) {
        return std::find(group.begin(), group.end(), me) != group.end();
      });
  const int size = static_cast<int>(members.size());
  Place place;
  place.options = proposals[me].options;
  place.options.notices = proposal.options.notices;
  place.layout = GroupLayout(size, world_.lanes());
  std::vector<int> ranks;
  for (const size_t member : members) {
    ranks.push_back(static_cast<int>(member));
    place.world_ranks.push_back(world_ranks_[member]);
  }
  place.rank = static_cast<int>(std::find(members.begin(), members.end(), me) - members.begin());

  BoardSeat& first = seats_[members[0]];
  if (place.rank == 0) {
    const absl::StatusOr<int64_t> offset = MakeMemory(place.layout, size);
    mine.codes[half] = static_cast<int32_t>(offset.status().code());
    WriteText(mine.messages[half], offset.status().message());
    mine.offsets[half] = offset.value_or(0);
    mine.formed.store(round, std::memory_order_seq_cst);
    Wake(ranks);
  }
  const int maker[] = {ranks[0]};
  EBB_RETURN_IF_ERROR(
      AwaitAll(round, options, maker, [](const BoardSeat& seat) { return seat.formed.load(); }));
  if (first.codes[half] != 0) {
    return absl::Status(static_cast<absl::StatusCode>(first.codes[half]), first.messages[half]);
  }
  place.offset = first.offsets[half];
  absl::StatusOr<Mapping> memory = world_.file().Map(place.offset, place.layout.bytes());
  if (!memory.ok()) return Break(memory.status());
  place.memory = *std::move(memory);
  return place;
}

absl::Status Board::AwaitAll(int64_t round, const CommunicatorOptions& options,
                             std::span<const int> ranks,
                             absl::FunctionRef<int64_t(const BoardSeat&)> rounds) {
  const auto is_absent = [&](int rank) { return rounds(seats_[rank]) < round; };
  const auto complete = [&] { return std::none_of(ranks.begin(), ranks.end(), is_absent); };
  const auto gone = [&]() -> int {
    for (const int rank : ranks) {
      if (farewell_(rank)->left.load(std::memory_order_acquire) != 0 && is_absent(rank))
        return rank;
    }
    return -1;
  };
  const auto over = [&] { return broken_->is_set() || !failure_().ok() || gone() >= 0; };
  const auto say = [&](double seconds) { SayWaiting(options, ranks, is_absent, seconds); };
  AwaitAndSay(
      world_.point(world_ranks_[static_cast<size_t>(rank_)], kPoint),
      [&] { return complete() || over(); }, DeadlineAfter(CreationSeconds(options)),
      WaitPoint::kSpin, options.notices, say);
  // Failing is for good: also for a rank that comes when all the others are there already.
  EBB_RETURN_IF_ERROR(failure_());
  if (broken_->is_set()) return broken_->Get();
  if (complete()) return absl::OkStatus();
  if (const int rank = gone(); rank >= 0) {
    return Break(LeftBeforeCreationStatus(NamedRank(rank), farewell_(rank)->how));
  }
  std::vector<int> absent;
  for (const int rank : ranks) {
    if (is_absent(rank)) absent.push_back(NamedRank(rank));
  }
  return Break(LateCreationStatus(options, RankNames(absent)));
}

// The first of those that have come says it.
void Board::SayWaiting(const CommunicatorOptions& options, std::span<const int> ranks,
                       absl::FunctionRef<bool(int rank)> is_absent, double seconds) {
  std::vector<int> absent;
  int first = -1;
  for (const int rank : ranks) {
    if (is_absent(rank)) {
      absent.push_back(NamedRank(rank));
    } else if (first < 0) {
      first = rank;
    }
  }
  const std::string known = world_.CompareCalls(absent);
  // Of those that wait for a group's memory, none of which is absent for the others, each says it.
  if (absent.empty() || (first >= 0 && first != rank_) || world_.failed()) return;
  LogWaiting(absl::StrCat("rank ", NamedRank(rank_)), seconds,
             WaitsForCreation(options, RankNames(absent)), options.timeout_seconds, known);
}

absl::StatusOr<int64_t> Board::MakeMemory(const GroupLayout& layout, int ranks) {
  const int64_t offset = world_.NextOffset(layout.bytes());
  EBB_RETURN_IF_ERROR(world_.file().Reserve(offset, layout.bytes()));
  EBB_ASSIGN_OR_RETURN(const Mapping memory, world_.file().Map(offset, layout.bytes()));
  reinterpret_cast<GroupHeader*>(memory.data())->users.store(ranks);
  return offset;
}

absl::Status Board::Break(const absl::Status& why) {
  broken_->TrySet(why);
  std::vector<int> all(world_ranks_.size());
  std::iota(all.begin(), all.end(), 0);
  Wake(all);
  return broken_->Get();
}

int Board::NamedRank(int rank) const {
  return world_.named_rank(world_ranks_[static_cast<size_t>(rank)]);
}

void Board::Wake(std::span<const int> ranks) {
  for (const int rank : ranks)
    world_.point(world_ranks_[static_cast<size_t>(rank)], kPoint).Notify();
}

}  // namespace ebb::node
