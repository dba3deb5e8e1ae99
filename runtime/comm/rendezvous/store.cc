#include "ebb/runtime/comm/rendezvous/store.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <numeric>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/thread_limit.h"

namespace ebb {
namespace {

// Every rank's thread reads whatever comes: a rank that takes nothing for so long has ended or is stuck.
constexpr std::chrono::milliseconds kSendPatience{500};
// Others wait a little longer than rank 0 does, so that they hear from it which rank is missing.
constexpr double kGraceSeconds = 1;

WaitPoint::Deadline Soon() {
  return WaitPoint::Clock::now() + kSendPatience;
}

// Not open where the kernel or a container does not let us.
Descriptor OpenProcess(int64_t pid) {
  return Descriptor(static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0)));
}

void Wake(const Descriptor& event) {
  const uint64_t one = 1;
  // An eventfd takes what fits its counter.
  [[maybe_unused]] const ssize_t written = write(event.get(), &one, sizeof(one));
}

void Rest(const Descriptor& event) {
  uint64_t wakes = 0;
  [[maybe_unused]] const ssize_t bytes = read(event.get(), &wakes, sizeof(wakes));
}

template <class Numbers>
void Pack(Packer& packer, const Numbers& numbers) {
  packer.Add(numbers.size());
  for (const int number : numbers) packer.Add(static_cast<uint64_t>(number));
}

std::vector<int> UnpackRanks(Unpacker& unpacker, int size) {
  std::vector<int> ranks;
  for (uint64_t left = unpacker.Number(); left > 0 && unpacker.ok(); --left)
    ranks.push_back(static_cast<int>(unpacker.Number() % static_cast<uint64_t>(size)));
  return ranks;
}

std::string PackRound(const Store::Round& round, bool comes, std::string_view text) {
  Packer packer;
  packer.Add(round.name).Add(round.what).Add(std::bit_cast<uint64_t>(round.timeout_seconds));
  Pack(packer, round.members);
  return packer.Add(uint64_t{comes}).Add(text).Take();
}

std::string PackGathered(const std::string& name, const Store::Gathered& gathered) {
  Packer packer;
  packer.Add(name).Add(static_cast<uint64_t>(gathered.outcome)).Add(gathered.number);
  Pack(packer, gathered.absent);
  packer.Add(gathered.texts.size());
  for (const std::string& text : gathered.texts) packer.Add(text);
  return packer.Take();
}

}  // namespace

std::optional<ParentProcess> ParentProcess::Find() {
  const pid_t pid = getppid();
  if (pid == 0) return std::nullopt;  // of another process namespace
  Descriptor process = OpenProcess(pid);
  // Else it has ended in between, and the id may mean another one.
  if (!process.is_open() || getppid() != pid) return std::nullopt;
  return ParentProcess{.pid = pid, .process = std::move(process)};
}

absl::StatusOr<std::shared_ptr<Store>> Store::Hold(int rank, Rendezvous rendezvous,
                                                   Watched watched) {
  const std::shared_ptr<Store> store(new Store(rank, std::move(rendezvous), std::move(watched)));
  if (!store->wake_.is_open())
    return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", std::strerror(errno)));
  store->WatchProcesses();
  try {
    store->thread_ = std::thread([store] { store->Run(); });
  } catch (const std::system_error& error) {
    return NoThread("no thread to hear the other ranks", error);
  }
  pthread_setname_np(store->thread_.native_handle(), "ebb-store");
  // The thread needs the object for longer than those that let it end.
  return std::shared_ptr<Store>(store.get(), [store](Store*) { store->Stop(); });
}

Store::Store(int rank, Rendezvous rendezvous, Watched watched)
    : rank_(rank),
      participants_(rendezvous.participants()),
      hosts_(FindHosts(participants_)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      watched_(std::move(watched)),
      processes_(participants_.size()),
      farewells_(std::make_shared<FarewellNotes>([this](std::string_view note) {
        const std::scoped_lock lock(mutex_);
        TellOthers(MessageType::kFarewell, note, rank_);
      })),
      calls_(rank, std::vector<CallRecord*>(participants_.size())),
      connections_(std::move(rendezvous).TakeConnections()),
      has_left_(participants_.size()) {}

int Store::local_rank() const {
  const std::vector<int>& here = hosts_.With(rank_);
  return static_cast<int>(std::find(here.begin(), here.end(), rank_) - here.begin());
}

void Store::WatchProcesses() {
  const Participant& me = participants_[static_cast<size_t>(rank_)];
  for (const Participant& other : participants_) {
    if (!watched_.ended_in_order || other.rank == rank_ || other.pid_namespace != me.pid_namespace)
      continue;
    processes_[static_cast<size_t>(other.rank)] =
        OpenProcess(other.pid);  // or connections are left
  }
}

void Store::Stop() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  Wake(wake_);
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();  // a listener has ended the world
  } else {
    thread_.join();
  }
}

void Store::Run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (std::exchange(to_tell_, false)) {
      const std::vector<Heard> listeners = std::exchange(listeners_, {});
      const absl::Status why = failure_;
      lock.unlock();
      for (const Heard& heard : listeners) heard(why);
      lock.lock();
      continue;
    }
    WaitPoint::Deadline next = WaitPoint::kNever;
    for (const auto& [name, round] : rounds_) {
      if (!round.outcome.has_value() && round.notice.has_value())
        next = std::min({next, round.due, round.notice->due()});
    }
    polled_.assign(1, {.fd = wake_.get(), .events = POLLIN, .revents = 0});
    const auto add = [&](int fd) {  // -1 is passed over
      polled_.push_back({.fd = fd, .events = POLLIN, .revents = 0});
    };
    for (const Connection& connection : connections_) add(connection.fd());
    for (const Descriptor& process : processes_) add(process.get());
    add(watched_.launcher.has_value() ? watched_.launcher->process.get() : -1);
    constexpr int kSliceMilliseconds = 60'000;
    const int wait = PollMilliseconds(next, kSliceMilliseconds);
    lock.unlock();
    const int ready = poll(polled_.data(), polled_.size(), wait);
    lock.lock();
    const auto is_ready = [&](size_t place) { return ready > 0 && polled_[place].revents != 0; };
    if (is_ready(0)) Rest(wake_);
    for (size_t i = 0; i < connections_.size(); ++i) {
      if (is_ready(1 + i)) Hear(i);
    }
    for (size_t rank = 0; rank < processes_.size(); ++rank) {
      if (!is_ready(1 + connections_.size() + rank)) continue;
      processes_[rank] = Descriptor();
      Died(static_cast<int>(rank), "");
    }
    if (is_ready(1 + connections_.size() + processes_.size())) {
      Broken(absl::UnavailableError(
                 absl::StrCat("the launcher of the ranks, ", watched_.launcher_name, " (process ",
                              watched_.launcher->pid, "), has ended: it was killed or crashed")),
             rank_);
      watched_.launcher.reset();
    }
    if (!calls_to_hear_.empty() || !notes_to_hear_.empty()) {
      const std::vector<std::string> calls = std::exchange(calls_to_hear_, {});
      const std::vector<std::string> notes = std::exchange(notes_to_hear_, {});
      absl::Status apart;
      lock.unlock();  // of many ranks, comparing takes a while
      for (const std::string& text : calls) apart.Update(calls_.Hear(text));
      for (const std::string& note : notes) hear_note_(note);
      lock.lock();
      Broken(std::move(apart), rank_);
    }
    LookAtRounds(WaitPoint::Clock::now());
  }
  TellOthers(MessageType::kGoodbye, "", rank_);
}

void Store::Hear(size_t connection) {
  const int from = RankAt(connection);
  for (;;) {
    absl::StatusOr<std::optional<Message>> message = connections_[connection].TryReceive();
    if (message.ok() && !message->has_value()) return;
    if (message.ok() && (*message)->type != MessageType::kGoodbye) {
      Understand(from, **std::move(message));
      continue;
    }
    connections_[connection].Close();
    if (message.ok()) return Leave(from);
    return Died(from, absl::StrCat(" (", message.status().message(), ")"));
  }
}

void Store::Died(int rank, std::string_view how) {
  if (watched_.ended_in_order && watched_.ended_in_order(rank)) return Leave(rank);
  Broken(absl::UnavailableError(absl::StrCat(
             Name(rank), " has died: it was killed, has crashed or has exited without leaving",
             absl::string_view(how.data(), how.size()))),
         rank);
}

void Store::Understand(int from, Message message) {
  const auto pass_on = [&] {
    if (rank_ == 0) TellOthers(message.type, message.payload, from);
  };
  Unpacker unpacker(message.payload);
  if (message.type == MessageType::kRefusal) {
    Broken(UnpackStatus(message.payload), from);
  } else if (message.type == MessageType::kFarewell) {
    pass_on();
    farewells_->Hear(message.payload);
  } else if (message.type == MessageType::kNote) {
    pass_on();
    if (hear_note_) notes_to_hear_.push_back(std::move(message.payload));
  } else if (message.type == MessageType::kCalls) {
    pass_on();
    calls_to_hear_.push_back(std::move(message.payload));
  } else if (message.type == MessageType::kBlob && rank_ == 0) {
    Round round;
    round.name = unpacker.Text();
    round.what = unpacker.Text();
    round.timeout_seconds = std::bit_cast<double>(unpacker.Number());
    round.members = UnpackRanks(unpacker, size());
    const bool comes = unpacker.Number() != 0;
    std::string text = unpacker.Text();
    if (unpacker.ok()) Collect(from, round, comes, std::move(text));
  } else if (message.type == MessageType::kBlobs && rank_ != 0) {
    const std::string name = unpacker.Text();
    Gathered gathered;
    gathered.outcome = static_cast<Gathered::Outcome>(unpacker.Number());
    gathered.number = unpacker.Number();
    gathered.absent = UnpackRanks(unpacker, size());
    for (uint64_t left = unpacker.Number(); left > 0 && unpacker.ok(); --left)
      gathered.texts.push_back(unpacker.Text());
    if (unpacker.ok()) outcomes_[name] = std::move(gathered);
    changed_.notify_all();
  }
}

void Store::Collect(int from, const Round& round, bool comes, std::string text) {
  Collected& all = rounds_[round.name];
  if (all.members.empty()) {
    all.members = round.members;
    all.texts.resize(round.members.size());
  }
  const auto found = std::find(all.members.begin(), all.members.end(), from);
  if (found == all.members.end()) return;
  const auto place = static_cast<size_t>(found - all.members.begin());
  ++all.here;
  if (comes) all.texts[place] = std::move(text);
  // The first that waits sets the time.
  if (comes && !all.notice.has_value()) {
    all.what = round.what;
    all.timeout_seconds = round.timeout_seconds;
    all.due = DeadlineAfter(round.timeout_seconds);
  }
  if (comes && (from == rank_ || !all.notice.has_value())) all.notice.emplace(round.notices);
  if (!comes && !all.outcome.has_value()) {
    Settle(round.name, all, Gathered::Outcome::kLeft, {from});
  } else if (!all.outcome.has_value() && all.here == all.members.size()) {
    Settle(round.name, all, Gathered::Outcome::kAll, {});
  } else if (!all.outcome.has_value()) {
    for (const int member : all.members) {
      if (has_left_[static_cast<size_t>(member)] && !all.outcome.has_value())
        Settle(round.name, all, Gathered::Outcome::kLeft, {member});
    }
  }
  Answer(round.name, all);
  if (all.here == all.members.size()) rounds_.erase(round.name);
}

void Store::Settle(const std::string& name, Collected& round, Gathered::Outcome outcome,
                   std::vector<int> absent) {
  round.outcome =
      Gathered{.outcome = outcome, .number = ++settled_, .texts = {}, .absent = std::move(absent)};
  if (outcome == Gathered::Outcome::kAll) {
    for (std::optional<std::string>& text : round.texts)
      round.outcome->texts.push_back(*std::exchange(text, std::nullopt));
  }
  Answer(name, round);
}

// All members, also those that have not come: rank 0 may have left by then. No member, if none waits.
void Store::Answer(const std::string& name, Collected& round) {
  if (!round.outcome.has_value() || !round.notice.has_value() || round.answered) return;
  round.answered = true;
  const std::string packed = PackGathered(name, *round.outcome);
  for (const int member : round.members) {
    if (member == rank_) {
      outcomes_[name] = *round.outcome;
    } else {  // one that has ended is heard of
      connections_[static_cast<size_t>(member)]
          .Send(MessageType::kBlobs, packed, Soon())
          .IgnoreError();
    }
  }
  changed_.notify_all();
}

void Store::LookAtRounds(WaitPoint::Deadline now) {
  for (auto& [name, round] : rounds_) {
    if (round.outcome.has_value() || !round.notice.has_value()) continue;
    std::vector<int> absent;
    for (size_t place = 0; place < round.members.size(); ++place) {
      if (!round.texts[place].has_value()) absent.push_back(round.members[place]);
    }
    if (now >= round.due) {
      Settle(name, round, Gathered::Outcome::kLate, std::move(absent));
    } else if (const std::optional<double> seconds = round.notice->Take(now)) {
      const auto first = std::find_if(round.texts.begin(), round.texts.end(),
                                      [](const auto& text) { return text.has_value(); });
      const int speaks = round.members[static_cast<size_t>(first - round.texts.begin())];
      LogWaiting(absl::StrCat("rank ", speaks), *seconds,
                 absl::StrCat("for ", RankNames(absent), " ", round.what), round.timeout_seconds,
                 calls_.Describe(absent));
    }
  }
}

// No failure, unless a rank waits for it.
void Store::Leave(int rank) {
  has_left_[static_cast<size_t>(rank)] = true;
  for (auto& [name, round] : rounds_) {
    if (!round.outcome.has_value() &&
        std::find(round.members.begin(), round.members.end(), rank) != round.members.end())
      Settle(name, round, Gathered::Outcome::kLeft, {rank});
  }
  changed_.notify_all();
}

void Store::Broken(absl::Status why, int told_by) {
  if (!failure_.ok() || why.ok()) return;
  failure_ = std::move(why);
  to_tell_ = true;
  // Rank 0 passes it on between ranks that are not connected to each other.
  TellOthers(MessageType::kRefusal, PackStatus(failure_), told_by);
  changed_.notify_all();
  Wake(wake_);
}

void Store::TellOthers(MessageType type, std::string_view payload, int except) {
  for (size_t i = 0; i < connections_.size(); ++i) {
    if (connections_[i].is_open() && RankAt(i) != except)
      connections_[i].Send(type, payload, Soon()).IgnoreError();  // one that has ended is heard of
  }
}

bool Store::HasLeft(int rank) {
  const std::scoped_lock lock(mutex_);
  return has_left_[static_cast<size_t>(rank)];
}

void Store::Tell(std::string_view note) {
  const std::scoped_lock lock(mutex_);
  TellOthers(MessageType::kNote, note, rank_);
}

void Store::OnNote(std::function<void(std::string_view note)> hear) {
  const std::scoped_lock lock(mutex_);
  hear_note_ = std::move(hear);
}

void Store::TellCalls() {
  absl::Status apart = calls_.Check(rank_);  // the others are compared as they are heard
  const std::scoped_lock lock(mutex_);
  Broken(std::move(apart), rank_);
  TellOthers(MessageType::kCalls, calls_.Pack(), rank_);
}

std::string Store::CompareCalls(std::span<const int> ranks) {
  absl::Status apart = calls_.Check();
  const std::scoped_lock lock(mutex_);
  Broken(std::move(apart), rank_);
  return calls_.Describe(ranks);
}

absl::StatusOr<Store::Gathered> Store::Gather(const Round& round, std::string_view mine) {
  // A rank that waits lets the others compare what it has called.
  WaitNotice telling({.first_seconds = round.notices.first_seconds / 5,
                      .interval_seconds = round.notices.interval_seconds});
  const WaitPoint::Deadline late = DeadlineAfter(round.timeout_seconds + kGraceSeconds);
  std::unique_lock lock(mutex_);
  EBB_RETURN_IF_ERROR(failure_);
  if (rank_ == 0) {
    Collect(0, round, /*comes=*/true, std::string(mine));
    Wake(wake_);  // there is a time now
  } else {
    TellOthers(MessageType::kBlob, PackRound(round, /*comes=*/true, mine), rank_);
  }
  const auto is_over = [&] {
    return outcomes_.contains(round.name) || !failure_.ok() || has_left_[0];
  };
  while (!is_over() && WaitPoint::Clock::now() < late) {
    if (telling.Take().has_value()) {
      lock.unlock();
      TellCalls();
      lock.lock();
      continue;
    }
    const WaitPoint::Deadline next = std::min(late, telling.due());
    if (next == WaitPoint::kNever) {
      changed_.wait(lock, is_over);
    } else {
      changed_.wait_until(lock, next, is_over);
    }
  }
  const auto gathered = outcomes_.extract(round.name);
  EBB_RETURN_IF_ERROR(failure_);  // older than what it may have led to
  if (gathered) return gathered.mapped();
  return Gathered{.outcome = has_left_[0] ? Gathered::Outcome::kLeft : Gathered::Outcome::kLate,
                  .number = 0,
                  .texts = {},
                  .absent = {0}};
}

void Store::LeaveRound(const Round& round) {
  const std::scoped_lock lock(mutex_);
  outcomes_.erase(round.name);
  if (!failure_.ok()) return;
  if (rank_ == 0) {
    Collect(0, round, /*comes=*/false, "");
  } else {
    TellOthers(MessageType::kBlob, PackRound(round, /*comes=*/false, ""), rank_);
  }
}

absl::StatusOr<std::vector<std::string>> Store::AllGather(std::string_view mine,
                                                          double timeout_seconds) {
  Round round = {.name = "",
                 .members = std::vector<int>(participants_.size()),
                 .timeout_seconds = timeout_seconds,
                 .what = "to connect the ranks' GPUs"};
  std::iota(round.members.begin(), round.members.end(), 0);
  {
    const std::scoped_lock lock(mutex_);
    round.name = absl::StrCat("all ", ++gathered_);
  }
  EBB_ASSIGN_OR_RETURN(Gathered gathered, Gather(round, mine));
  if (gathered.outcome == Gathered::Outcome::kAll) return std::move(gathered.texts);
  constexpr size_t kNamed = 8;
  std::vector<std::string> names;
  for (const int rank : gathered.absent) {
    if (names.size() < kNamed) names.push_back(Name(rank));
  }
  std::string absent = absl::StrJoin(names, ", ");
  if (gathered.absent.size() > kNamed)
    absl::StrAppend(&absent, " and ", gathered.absent.size() - kNamed, " more");
  // An error on one rank is one on all.
  const std::scoped_lock lock(mutex_);
  Broken(gathered.outcome == Gathered::Outcome::kLeft
             ? absl::UnavailableError(
                   absl::StrCat(absent, " has left: its world was destroyed, or its process ends"))
             : absl::DeadlineExceededError(absl::StrCat(
                   "the ranks have waited ", timeout_seconds, " s for ", absent,
                   ": not there where all ranks tell each other what they need to connect their "
                   "GPUs")),
         rank_);
  return failure_;
}

void Store::Break(const absl::Status& why) {
  const std::scoped_lock lock(mutex_);
  Broken(why, rank_);
}

void Store::Fail(const absl::Status& why) {
  Break(absl::Status(why.code(), absl::StrCat(why.message(), " (told by ", Name(rank_), ")")));
}

void Store::OnFailure(Heard heard) {
  absl::Status already;
  {
    const std::scoped_lock lock(mutex_);
    already = failure_;
    if (already.ok() || to_tell_) return listeners_.push_back(std::move(heard));
  }
  heard(already);
}

}  // namespace ebb
