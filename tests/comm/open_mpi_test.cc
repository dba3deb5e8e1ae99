// A program that has linked another MPI, of which this is the only function.
#include "ebb/runtime/comm/mpi/open_mpi.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "ebb/runtime/comm/world.h"
#include "tests/status.h"

extern "C" int MPI_Get_library_version(char* text, int* length) {
  std::strcpy(text, "MPICH Version:      4.0\nMPICH Release date: Fri Jan 21");
  *length = static_cast<int>(std::strlen(text));
  return 0;
}

namespace ebb::testing::open_mpi_test {
namespace {

TEST(OpenMpi, AnotherMpiIsRefusedByName) {
  const absl::Status refused = LoadOpenMpi().status();
  EXPECT_THAT(refused,
              StatusIs(absl::StatusCode::kUnavailable, "another MPI (MPICH Version:      4.0)",
                       "or start all ranks on one host"));
}

TEST(OpenMpi, RanksOfSeveralHostsSayWhyTheyCannotMeet) {
  setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
  setenv("OMPI_COMM_WORLD_RANK", "1", 1);
  setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2", 1);
  setenv("PMIX_NAMESPACE", "job", 1);
  const absl::Status status = World::FromEnvironment().status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnimplemented, "rank 1 of 4, on host '",
                               "another MPI (MPICH"));
}

}  // namespace
}  // namespace ebb::testing::open_mpi_test
