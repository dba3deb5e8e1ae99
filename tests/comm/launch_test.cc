#include "ebb/runtime/comm/launch/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ostream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/status.h"

namespace ebb::testing::launch_test {
namespace {

using ::testing::StartsWith;

template <class Parameter>
std::string NameOf(const ::testing::TestParamInfo<Parameter>& info) {
  return info.param.name;
}

// The variables of a text like "RANK=0 WORLD_SIZE=2". If a name is there twice, the last one counts.
Environment Variables(const std::string& text) {
  Environment variables;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    variables[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return variables;
}

// The Launch of a launcher's variables.
Launch LaunchOf(const std::string& variables) {
  const auto launch = DescribeLaunch(Variables(variables));
  const bool is_there = launch.ok() && launch->has_value();
  EXPECT_TRUE(is_there) << variables << ": " << launch.status();
  return is_there ? **launch : Launch();
}

// A launcher's variables, and the expected Launch.
struct Understood {
  std::string name, variables;
  std::string launcher;
  int rank, size;
  bool one_host;
  std::string place;  // its beginning; empty: no place
};
void PrintTo(const Understood& launch, std::ostream* out) {
  *out << launch.name;
}

class LaunchTest : public ::testing::TestWithParam<Understood> {};

TEST_P(LaunchTest, IsUnderstood) {
  const Understood& expected = GetParam();
  const Launch launch = LaunchOf(expected.variables);
  EXPECT_EQ(launch.launcher, expected.launcher);
  EXPECT_EQ(launch.rank, expected.rank);
  EXPECT_EQ(launch.size, expected.size);
  EXPECT_EQ(launch.one_host, expected.one_host);
  ASSERT_EQ(launch.place.has_value(), !expected.place.empty());
  if (launch.place) {
    EXPECT_THAT(Describe(*launch.place), StartsWith(expected.place));
  }
}

std::string With(const std::string& variables, const std::string& more) {
  return variables + " " + more;
}

const std::string kTorchrun =
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=3 LOCAL_WORLD_SIZE=4 "
    "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500";
const char kByHand[] = "a shell or a launcher like torchrun";
const std::string kMpirun =
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "PMIX_NAMESPACE=742260737";
const std::string kSlurm =
    "SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=8 SLURM_JOB_ID=77 SLURM_STEP_ID=0 "
    "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=n[03-04]";
const std::string kSlurmOfOneHost = With(kSlurm, "SLURM_STEP_NUM_NODES=1");

const Understood kLaunches[] = {
    {"like_torchrun", kTorchrun, kByHand, 3, 4, true, "host '10.0.0.1', port 29500"},
    {"torchrun_of_two_hosts", With(kTorchrun, "LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=r1"),
     "torchrun", 3, 4, false, "host '10.0.0.1', port 29500"},
    {"two_torchruns_of_one_host",
     With(kTorchrun, "LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=r1 MASTER_ADDR=127.0.0.1"), "torchrun",
     3, 4, false, "host '127.0.0.1', port 29500"},
    {"torchrun_that_has_the_port_itself",
     With(kTorchrun, "TORCHELASTIC_RUN_ID=r1 TORCHELASTIC_USE_AGENT_STORE=True"), "torchrun", 3, 4,
     true, "the socket '@ebb-"},
    {"by_hand", "RANK=0 WORLD_SIZE=2 MASTER_ADDR=::1 MASTER_PORT=1", kByHand, 0, 2, false,
     "host '::1', port 1"},
    {"mpirun", kMpirun, "Open MPI's mpirun", 1, 2, true, "the socket '@ebb-"},
    {"mpirun_with_a_place", With(kMpirun, "MASTER_ADDR=h MASTER_PORT=9"), "Open MPI's mpirun", 1, 2,
     true, "host 'h', port 9"},
    {"mpirun_of_two_hosts", With(kMpirun, "OMPI_COMM_WORLD_LOCAL_SIZE=1"), "Open MPI's mpirun", 1,
     2, false, ""},
    {"mpirun_inside_slurm", With(With(kSlurm, "SLURM_PROCID=0"), kMpirun), "Open MPI's mpirun", 1,
     2, true, "the socket '@ebb-"},
    {"torchrun_inside_slurm", With(With(kSlurm, kTorchrun), "TORCHELASTIC_RUN_ID=r1"), "torchrun",
     3, 4, true, "host '10.0.0.1', port 29500"},
    {"mpich", "PMI_RANK=1 PMI_SIZE=2 MASTER_ADDR=h MASTER_PORT=9", "an MPI launcher", 1, 2, false,
     "host 'h', port 9"},
    {"slurm", kSlurm, "SLURM's srun", 5, 8, false, "host 'n03', port 2"},
    {"slurm_on_one_host", kSlurmOfOneHost, "SLURM's srun", 5, 8, true, "the socket '@ebb-"},
    {"slurm_on_one_host_with_a_place", With(kSlurmOfOneHost, "MASTER_ADDR=h MASTER_PORT=9"),
     "SLURM's srun", 5, 8, true, "host 'h', port 9"},
    // Without numbers of its own, it could meet other launches.
    {"slurm_on_one_host_of_an_unknown_step",
     "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_NNODES=1 SLURM_NODELIST=n7", "SLURM's srun", 0, 2, true,
     "host 'n7', port 2"},
    {"slurm_with_pmi2", With(kSlurmOfOneHost, "PMI_RANK=5 PMI_SIZE=8 PMI_FD=11"), "SLURM's srun", 5,
     8, true, "the socket '@ebb-"},
    // A script exports one of the two for another program.
    {"slurm_with_its_size_exported", With(kSlurmOfOneHost, "WORLD_SIZE=8"), "SLURM's srun", 5, 8,
     true, "the socket '@ebb-"},
    {"slurm_with_its_rank_exported", With(kSlurmOfOneHost, "RANK=5"), "SLURM's srun", 5, 8, true,
     "the socket '@ebb-"},
    {"mpirun_with_its_size_exported", With(kMpirun, "WORLD_SIZE=2"), "Open MPI's mpirun", 1, 2,
     true, "the socket '@ebb-"},
    {"mpich_with_its_size_exported",
     "PMI_RANK=1 PMI_SIZE=2 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=9", "an MPI launcher", 1, 2,
     false, "host 'h', port 9"},
    // srun has started mpirun's daemon, whose numbers are not those of the ranks.
    {"mpirun_inside_slurm_with_its_size_exported",
     With(With(kSlurm, "SLURM_PROCID=0"), With(kMpirun, "WORLD_SIZE=2")), "Open MPI's mpirun", 1, 2,
     true, "the socket '@ebb-"},
    {"one_process", "RANK=0 WORLD_SIZE=1", kByHand, 0, 1, false, ""}};
INSTANTIATE_TEST_SUITE_P(Launchers, LaunchTest, ::testing::ValuesIn(kLaunches), NameOf<Understood>);

TEST(Launch, AnMpiThatWouldFindAllRanksIsKnown) {
  const auto has_mpi = [](const std::string& variables) { return LaunchOf(variables).has_mpi; };
  const std::string pmix = "PMIX_NAMESPACE=slurm.pmix.77.0";
  EXPECT_TRUE(has_mpi(kMpirun));
  EXPECT_TRUE(has_mpi(With(kSlurm, pmix)));
  EXPECT_FALSE(has_mpi(kSlurm));
  EXPECT_FALSE(has_mpi(kTorchrun));
  // MPICH's launcher serves PMI to its own MPI, also where srun has started it.
  const std::string mpich =
      "PMI_RANK=1 PMI_SIZE=2 PMI_FD=7 PMI_PORT=h:1234 MASTER_ADDR=h MASTER_PORT=9";
  EXPECT_FALSE(has_mpi(mpich));
  EXPECT_FALSE(has_mpi(With(With(kSlurm, pmix), mpich)));
  EXPECT_TRUE(has_mpi(With(kSlurm, "PMI_RANK=5 PMI_SIZE=8 PMI_FD=7")));
  // srun has started torchrun, and torchrun the ranks.
  EXPECT_FALSE(has_mpi(With(With(With(kSlurm, kTorchrun), pmix), "TORCHELASTIC_RUN_ID=r1")));
}

TEST(Launch, ALauncherThatOutlivesItsRanksIsKnown) {
  const auto stays = [](const std::string& variables) {
    return LaunchOf(variables).launcher_outlives_ranks;
  };
  const std::string agent = "TORCHELASTIC_RUN_ID=r1";
  EXPECT_TRUE(stays(kMpirun));
  EXPECT_TRUE(stays(With(With(kSlurm, "SLURM_PROCID=0"), kMpirun)));
  EXPECT_TRUE(stays(With(kTorchrun, agent)));
  EXPECT_TRUE(stays(With(With(kSlurm, kTorchrun), agent)));
  // Set by hand: a shell that starts the ranks may end before them.
  EXPECT_FALSE(stays(kTorchrun));
  EXPECT_FALSE(stays(kSlurm));
  EXPECT_FALSE(stays("PMI_RANK=1 PMI_SIZE=2 MASTER_ADDR=h MASTER_PORT=9"));
  EXPECT_FALSE(stays("RANK=0 WORLD_SIZE=1 TORCHELASTIC_RUN_ID=r1"));
}

TEST(Launch, TheFirstOfAHostIsKnown) {
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"}) {
    EXPECT_TRUE(IsFirstOfHost({{name, "0"}})) << name;
    EXPECT_FALSE(IsFirstOfHost({{name, "1"}})) << name;
  }
  EXPECT_FALSE(IsFirstOfHost({}));
  // srun has started mpirun.
  EXPECT_FALSE(IsFirstOfHost(Variables("OMPI_COMM_WORLD_LOCAL_RANK=3 SLURM_LOCALID=0")));
}

TEST(Launch, RanksOfOneJobMeetAtOnePlaceAndThoseOfAnotherElsewhere) {
  for (const std::string& slurm : {kSlurm, kSlurmOfOneHost}) {
    std::set<std::string> places;
    for (const char* step : {"0", "1", "2"}) {
      for (const char* rank : {"0", "7"}) {
        const std::string own = std::string("SLURM_PROCID=") + rank + " SLURM_STEP_ID=" + step;
        places.insert(Describe(*LaunchOf(With(slurm, own)).place));
      }
    }
    EXPECT_EQ(places.size(), 3u);
  }
}

TEST(Launch, RanksStartedByHandAreOfTheirSlurmJob) {
  const auto job = [](const std::string& variables) { return LaunchOf(variables).job; };
  EXPECT_EQ(job(kTorchrun), "");
  const std::string batch_script = "SLURM_JOB_ID=77 SLURM_PROCID=0";
  EXPECT_EQ(job(With(kTorchrun, batch_script)), "77");
  // A job may have one step a host.
  EXPECT_EQ(job(With(kTorchrun, "SLURM_JOB_ID=77 SLURM_STEP_ID=3")), "77");
  EXPECT_EQ(job(With(With(kTorchrun, batch_script), "TORCHELASTIC_RUN_ID=r1")), "r1");
  for (const char* variable : {"PBS_JOBID=78", "LSB_JOBID=78"})
    EXPECT_EQ(job(With(kTorchrun, variable)), "78") << variable;
}

TEST(Launch, WithoutALauncherThereIsNone) {
  for (const std::string& variables :
       {std::string(), std::string("PATH=/bin MASTER_ADDR=h"),
        // A shell in an interactive allocation, and a batch script; srun has not started them.
        std::string("SLURM_NTASKS=4 SLURM_JOB_ID=7"),
        std::string("SLURM_NTASKS=4 SLURM_JOB_ID=7 SLURM_PROCID=0"),
        // A shell of salloc that is a step: srun has started one process.
        With(kSlurm, "SLURM_PROCID=0 SLURM_STEP_ID=4294967290")}) {
    ASSERT_OK_AND_ASSIGN(const auto launch, DescribeLaunch(Variables(variables)));
    EXPECT_FALSE(launch.has_value());
  }
}

// An environment that is wrong, and its message.
struct Refused {
  std::string name, variables;
  absl::StatusCode code;
  std::string text;
};
void PrintTo(const Refused& launch, std::ostream* out) {
  *out << launch.name;
}
class LaunchRefusalTest : public ::testing::TestWithParam<Refused> {};

TEST_P(LaunchRefusalTest, SaysWhatIsWrong) {
  EXPECT_THAT(DescribeLaunch(Variables(GetParam().variables)).status(),
              StatusIs(GetParam().code, GetParam().text));
}

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kPrecondition = absl::StatusCode::kFailedPrecondition;

const Refused kRefused[] = {
    {"rank_alone", "RANK=1", kInvalid, "RANK=1 but no WORLD_SIZE"},
    {"size_alone", "WORLD_SIZE=2", kInvalid, "WORLD_SIZE=2 but no RANK"},
    {"no_place", "RANK=1 WORLD_SIZE=2", kInvalid, "MASTER_ADDR"},
    {"half_a_place", With(kMpirun, "MASTER_ADDR=h"), kInvalid, "no MASTER_PORT"},
    {"other_half", With(kMpirun, "MASTER_PORT=5"), kInvalid, "no MASTER_ADDR"},
    {"port", With(kTorchrun, "MASTER_PORT=99999"), kInvalid, "MASTER_PORT='99999'"},
    {"size_is_no_number", With(kTorchrun, "WORLD_SIZE=many"), kInvalid, "WORLD_SIZE='many'"},
    {"size_is_nothing", With(kTorchrun, "WORLD_SIZE="), kInvalid, "WORLD_SIZE=''"},
    {"size_of_zero", With(kTorchrun, "WORLD_SIZE=0"), kInvalid, "WORLD_SIZE='0'"},
    {"rank_outside", With(kTorchrun, "RANK=4"), kInvalid, "RANK='4'"},
    {"rank_below", With(kTorchrun, "RANK=-1"), kInvalid, "RANK='-1'"},
    {"more_ranks_here_than_at_all", With(kTorchrun, "LOCAL_WORLD_SIZE=5"), kInvalid,
     "LOCAL_WORLD_SIZE='5'"},
    {"several_hosts_and_a_loopback_address",
     With(kTorchrun, "LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost"), kInvalid,
     "LOCAL_WORLD_SIZE=2 and WORLD_SIZE=4"},
    {"torchrun_and_mpirun", With(kTorchrun, kMpirun), kPrecondition, "OMPI_COMM_WORLD_SIZE=2"},
    {"left_over_and_srun", With(kTorchrun, kSlurm), kPrecondition, "SLURM_NTASKS=8"},
    {"size_alone_beside_srun_with_another", With(kSlurm, "WORLD_SIZE=4"), kPrecondition,
     "WORLD_SIZE=4, but SLURM_NTASKS=8 (SLURM's srun): unset WORLD_SIZE"},
    {"rank_alone_beside_mpirun_with_another", With(kMpirun, "RANK=0"), kPrecondition,
     "RANK=0, but OMPI_COMM_WORLD_RANK=1"},
    {"size_alone_in_a_batch_script", "SLURM_JOB_ID=7 SLURM_PROCID=0 WORLD_SIZE=4", kInvalid,
     "WORLD_SIZE=4 but no RANK"},
    {"mpich_without_a_place", "PMI_RANK=1 PMI_SIZE=2", kInvalid, "no MASTER_ADDR and MASTER_PORT"},
    {"slurm_without_hosts", "SLURM_PROCID=0 SLURM_NTASKS=2", kInvalid, "SLURM_STEP_NODELIST"},
    {"slurm_with_nonsense", With(kSlurm, "SLURM_STEP_NODELIST=n[3"), kInvalid, "'n[3'"}};
INSTANTIATE_TEST_SUITE_P(Environments, LaunchRefusalTest, ::testing::ValuesIn(kRefused),
                         NameOf<Refused>);

TEST(FirstHost, ReadsTheShortForm) {
  const std::vector<std::pair<std::string, std::string>> lists = {
      {"node1", "node1"},
      {"node1,node2", "node1"},
      {"node[03-05,9],login", "node03"},
      {"n[7]", "n7"},
      {"n[12,14-15]", "n12"},
      {"rack[1-2]n[04-08]", "rack1n04"},
      {"n[1-2]-ib,m3", "n1-ib"},
      {"a-b[001-100]", "a-b001"},
      {"gpu-a.example.org", "gpu-a.example.org"},
  };
  for (const auto& [list, first] : lists) {
    ASSERT_OK_AND_ASSIGN(const std::string host, FirstHost(list));
    EXPECT_EQ(host, first);
  }
  for (const char* nonsense : {"", ",", "n[", "n[]", "n[3"}) EXPECT_FALSE(FirstHost(nonsense).ok());
}

}  // namespace
}  // namespace ebb::testing::launch_test
