#include "ebb/runtime/checkpoint/whole_checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/common_folder.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/device/machine.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

// Whether a file may be readable later, for example by another user. Loading an older checkpoint
// now would lose steps.
bool MayPass(const absl::Status& status) {
  return absl::IsPermissionDenied(status) || absl::IsResourceExhausted(status) ||
         absl::IsUnavailable(status);
}

// The checkpoints that a load has read and found damaged, and what was wrong with them.
struct Damaged {
  std::vector<std::string> paths;
  std::string why;

  bool Has(const std::string& path) const {
    return std::find(paths.begin(), paths.end(), path) != paths.end();
  }
  void Skip(Engine& engine, const std::string& path, const absl::Status& damage) {
    if (engine.world().rank() == 0)
      LogWarning(absl::StrCat("the checkpoint '", path, "' is skipped: ", damage.message()));
    paths.push_back(path);
    engine.damaged_checkpoints()->push_back(path);
    absl::StrAppend(&why, why.empty() ? "; " : ", ", damage.message());
  }
};

// The checkpoint to load, the same on all ranks. Each file is checked by one of the ranks. Damaged
// checkpoints are added to `damaged`. kCancelled: the folder has changed meanwhile.
absl::StatusOr<FoundCheckpoint> FindTogether(Engine& engine, const std::string& path,
                                             Damaged& damaged) {
  const absl::StatusOr<std::vector<std::string>> listed = CandidatesIn(path);
  const bool none = absl::IsNotFound(listed.status());
  const std::vector<std::string> candidates = listed.value_or(std::vector<std::string>());
  absl::Status own = none ? absl::OkStatus() : listed.status();
  // Agree gives this code to ranks with other candidates.
  if (absl::IsFailedPrecondition(own)) own = absl::InvalidArgumentError(own.message());
  const absl::Status same =
      engine.Agree(own, absl::StrCat("checkpoint: candidates ", absl::StrJoin(candidates, " ")));
  if (!same.ok() && own.ok() && absl::IsFailedPrecondition(same))
    return absl::CancelledError(same.message());
  EBB_RETURN_IF_ERROR(same);
  if (none) return listed.status();
  const Share share = {.rank = engine.world().rank(), .ranks = engine.world().size()};
  for (const std::string& checkpoint : candidates) {
    if (damaged.Has(checkpoint)) continue;
    absl::StatusOr<Manifest> manifest = CheckWhole(checkpoint, share);
    const absl::Status whole =
        manifest.ok() ? absl::OkStatus() : absl::DataLossError(manifest.status().message());
    const absl::Status agreed = engine.Agree(
        whole,
        absl::StrCat("checkpoint: ", checkpoint, " ", manifest.ok() ? ToText(*manifest) : ""));
    if (agreed.ok()) return FoundCheckpoint{.path = checkpoint, .manifest = *std::move(manifest)};
    if (absl::IsFailedPrecondition(agreed)) return absl::CancelledError(agreed.message());
    if (!absl::IsDataLoss(agreed)) return agreed;
    EBB_RETURN_IF_ERROR(engine.Agree(
        MayPass(manifest.status()) ? manifest.status() : absl::OkStatus(), "checkpoint: readable"));
    if (checkpoint == path) {
      // Another version's checkpoint is not damaged.
      return absl::IsFailedPrecondition(manifest.status()) ? manifest.status()
                                                           : WithWayOut(agreed, checkpoint);
    }
    damaged.Skip(engine, checkpoint, agreed);
  }
  // A run that saves there may have removed all of them, after it has saved newer ones.
  EBB_RETURN_IF_ERROR(
      engine.Agree(CandidatesIn(path).value_or(std::vector<std::string>()) == candidates
                       ? absl::OkStatus()
                       : absl::CancelledError("it has other checkpoints now"),
                   "checkpoint: none is whole"));
  return absl::DataLossError(absl::StrCat("no checkpoint in '", path, "' is whole", damaged.why));
}

// The checkpoints of each rank, if some ranks see others than rank 0. Collective.
absl::StatusOr<std::string> DifferentViews(Engine& engine, const std::string& path) {
  std::vector<std::string> names;
  for (const std::string& candidate : CandidatesIn(path).value_or(std::vector<std::string>()))
    names.push_back(std::filesystem::path(candidate).filename().string());
  constexpr size_t kShown = 3;
  if (names.size() > kShown) names.resize(kShown);
  const std::string own = names.empty() ? "none" : absl::StrJoin(names, ", ");
  constexpr char kAfterHost = '\n';
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                       engine.Exchange(absl::OkStatus(), "checkpoint: views",
                                       absl::StrCat(HostName(), std::string(1, kAfterHost), own)));
  std::map<std::string, std::vector<std::string>> hosts;  // by view, then by rank
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const size_t between = all[rank].find(kAfterHost);
    std::vector<std::string>& of_view = hosts[all[rank].substr(between + 1)];
    of_view.resize(all.size());
    of_view[rank] = all[rank].substr(0, between);
  }
  if (hosts.size() == 1) return "";
  std::vector<std::string> views;
  for (const auto& [view, of_view] : hosts)
    views.push_back(absl::StrCat(RanksOnHosts(of_view), ": ", view));
  return absl::StrCat(" (", absl::StrJoin(views, "; "), ")");
}

absl::StatusOr<FoundCheckpoint> Find(Engine& engine, const std::string& path, Damaged& damaged) {
  constexpr int kTries = 3;
  for (int tries = 1;; ++tries) {
    Damaged tried = damaged;
    absl::StatusOr<FoundCheckpoint> found = FindTogether(engine, path, tried);
    if (!absl::IsCancelled(found.status())) {
      damaged = std::move(tried);
      return found;
    }
    if (tries < kTries) continue;
    EBB_ASSIGN_OR_RETURN(const std::string views, DifferentViews(engine, path));
    return absl::FailedPreconditionError(
        absl::StrCat("'", path, "': ",
                     views.empty() ? std::string(found.status().message())
                                   : absl::StrCat("ranks see different checkpoints there", views),
                     ". Check that all ranks see one file system, and that no other run saves "
                     "there"));
  }
}

// Whether a run that saves beside the checkpoint has removed it, on any rank.
bool WasRemoved(Engine& engine, const std::string& checkpoint) {
  return absl::IsCancelled(
      engine.Agree(HasManifest(checkpoint)
                       ? absl::OkStatus()
                       : absl::CancelledError(absl::StrCat("'", checkpoint, "' was removed")),
                   "checkpoint: removed"));
}

// The error of a load that has overwritten values without loading a whole checkpoint. A folder
// without a checkpoint would be a reason to begin afresh.
absl::Status Unusable(const absl::Status& error) {
  return absl::Status(
      absl::IsNotFound(error) ? absl::StatusCode::kDataLoss : error.code(),
      absl::StrCat(error.message(),
                   ". The values of this run are undefined now: load a whole checkpoint, or create "
                   "the engine again"));
}

}  // namespace

absl::Status AgreeOnRead(Engine& engine, const ReadErrors& own, ReadAttempt& attempt) {
  const bool is_damage = !own.files.ok() && !MayPass(own.files);
  EBB_RETURN_IF_ERROR(
      engine.Agree(own.engine.ok() && !is_damage ? own.files : own.engine, "checkpoint: values"));
  return attempt.damage =
             engine.Agree(is_damage ? absl::DataLossError(own.files.message()) : absl::OkStatus(),
                          "checkpoint: checksums");
}

absl::Status ReadWholeCheckpoint(Engine& engine, const std::string& path, ReadCheckpoint read) {
  constexpr int kTries = 5;
  Damaged damaged;
  bool has_written = false;
  for (int removed = 0;;) {
    // Read before the checkpoint is found: a save meanwhile is one of another run.
    std::string last_save = LastSaveIn(HasManifest(path) ? path + "/.." : path);
    absl::StatusOr<FoundCheckpoint> found = Find(engine, path, damaged);
    if (!found.ok()) return has_written ? Unusable(found.status()) : found.status();
    found->last_save = std::move(last_save);
    const std::string checkpoint = found->path;
    ReadAttempt attempt;
    const absl::Status done = read(*std::move(found), attempt);
    if (done.ok()) return done;
    has_written |= attempt.has_written;
    if (checkpoint == path)
      return attempt.damage.ok() ? done : WithWayOut(attempt.damage, checkpoint);
    if (removed < kTries && WasRemoved(engine, checkpoint)) {
      ++removed;
      continue;
    }
    if (attempt.damage.ok()) return has_written ? Unusable(done) : done;
    damaged.Skip(engine, checkpoint, attempt.damage);
  }
}

}  // namespace ebb
