#include "ebb/runtime/comm/hosts/world.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

const std::vector<int>& HostOf(const Hosts& hosts, int rank) {
  return *std::find_if(hosts.ranks.begin(), hosts.ranks.end(), [&](const auto& ranks) {
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  });
}

}  // namespace

Hosts FindHosts(const std::vector<Participant>& participants) {
  std::vector<std::string> names;
  std::vector<int> host_of;
  for (const Participant& participant : participants) {
    const auto found = std::find(names.begin(), names.end(), participant.host_name);
    host_of.push_back(static_cast<int>(found - names.begin()));
    if (found == names.end()) names.push_back(participant.host_name);
  }
  return FindHosts(host_of);
}

absl::Status CpuRanksNeedMpi(const std::vector<Participant>& participants) {
  const Hosts hosts = FindHosts(participants);
  const std::string names =
      absl::StrJoin(hosts.ranks, ", ", [&](std::string* out, const std::vector<int>& ranks) {
        absl::StrAppend(out, participants[static_cast<size_t>(ranks[0])].host_name);
      });
  return absl::UnimplementedError(absl::StrCat(
      "the ranks are on ", hosts.count(), " hosts (", names,
      "): CPU ranks on several hosts need MPI, whose launcher has to start them (mpirun, srun "
      "--mpi=pmix), and meet in shared memory without it. Start all ranks on one host"));
}

// Of all that uses the star, the last stops it.
class HostsRank::StarBootstrap : public Bootstrap {
 public:
  explicit StarBootstrap(std::shared_ptr<Star> star)
      : star_(std::move(star)), hosts_(FindHosts(star_->participants())) {}
  ~StarBootstrap() override { star_->Stop(); }

  int rank() const override { return star_->rank(); }
  int size() const override { return static_cast<int>(star_->participants().size()); }
  int local_rank() const override {
    const std::vector<int>& here = HostOf(hosts_, rank());
    return static_cast<int>(std::find(here.begin(), here.end(), rank()) - here.begin());
  }
  int local_size() const override { return static_cast<int>(HostOf(hosts_, rank()).size()); }
  int ranks_per_host() const override { return hosts_.is_grid ? hosts_.width() : size(); }
  absl::StatusOr<std::vector<std::string>> AllGather(std::string_view mine,
                                                     double timeout_seconds) override {
    return star_->AllGather(mine, timeout_seconds);
  }
  void Fail(const absl::Status& why) override { star_->Fail(why); }
  CallOrder* calls() override { return size() > 1 ? &star_->calls() : nullptr; }
  void TellCalls() override { star_->TellCalls(); }
  void OnFailure(std::function<void(const absl::Status& why)> heard) override {
    star_->OnFailure(std::move(heard));
  }
  absl::StatusOr<std::unique_ptr<Farewells>> NewFarewells(double /*timeout_seconds*/) override {
    return star_->NewFarewells();
  }
  const Star& star() const { return *star_; }

 private:
  const std::shared_ptr<Star> star_;
  const Hosts hosts_;
};

absl::StatusOr<std::shared_ptr<WorldBackend>> HostsRank::Form(int rank, Rendezvous rendezvous) {
  EBB_ASSIGN_OR_RETURN(std::shared_ptr<Star> star, Star::Hold(rank, std::move(rendezvous)));
  return std::shared_ptr<WorldBackend>(
      new HostsRank(std::make_shared<StarBootstrap>(std::move(star))));
}

HostsRank::HostsRank(std::shared_ptr<StarBootstrap> bootstrap) : bootstrap_(std::move(bootstrap)) {}
HostsRank::~HostsRank() = default;

int HostsRank::rank() const {
  return bootstrap_->rank();
}

int HostsRank::size() const {
  return bootstrap_->size();
}

int HostsRank::local_rank() const {
  return bootstrap_->local_rank();
}

int HostsRank::local_size() const {
  return bootstrap_->local_size();
}

int HostsRank::ranks_per_host() const {
  return bootstrap_->ranks_per_host();
}

std::shared_ptr<Bootstrap> HostsRank::bootstrap() {
  return bootstrap_;
}

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> HostsRank::NewCommunicator(
    const CommunicatorOptions&) {
  return CpuRanksNeedMpi(bootstrap_->star().participants());
}

CallOrder* HostsRank::calls() {
  return bootstrap_->calls();
}

void HostsRank::Fail(absl::Status why) {
  bootstrap_->Fail(RankFailedStatus(rank(), why));
}

}  // namespace ebb
