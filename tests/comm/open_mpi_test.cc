// A program that has linked another MPI, of which this is the only function.
#include "ebb/runtime/comm/mpi/open_mpi.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "ebb/runtime/comm/world.h"

extern "C" int MPI_Get_library_version(char* text, int* length) {
  std::strcpy(text, "MPICH Version:      4.0\nMPICH Release date: Fri Jan 21");
  *length = static_cast<int>(std::strlen(text));
  return 0;
}

namespace ebb {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(OpenMpi, AnotherMpiIsRefusedByName) {
  const absl::Status refused = LoadOpenMpi().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("another MPI (MPICH Version:      4.0)"),
                    HasSubstr("or start all ranks on one host")));
}

TEST(OpenMpi, RanksOfSeveralHostsSayWhyTheyCannotMeet) {
  setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
  setenv("OMPI_COMM_WORLD_RANK", "1", 1);
  setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2", 1);
  setenv("PMIX_NAMESPACE", "job", 1);
  const absl::Status status = World::FromEnvironment().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("rank 1 of 4, on host '"), HasSubstr("another MPI (MPICH")));
}

}  // namespace
}  // namespace ebb
