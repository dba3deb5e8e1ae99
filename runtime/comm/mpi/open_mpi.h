// Open MPI's functions, opened when the first world over MPI is made
// (runtime/device/opened_library.h). They are declared here and not by mpi.h, so that a build needs
// no MPI. Open MPI 4 and 5 have one binary interface; tests/comm/mpi_ranks.cc compares it with
// mpi.h. Other MPIs have other handles, and are refused.
#pragma once

#include "absl/status/statusor.h"
#include "ebb/runtime/device/opened_library.h"

struct ompi_communicator_t;
struct ompi_datatype_t;
struct ompi_errhandler_t;
struct ompi_request_t;
struct ompi_status_public_t;

namespace ebb {

struct OpenMpi : LibraryFunctions {
  using LibraryFunctions::LibraryFunctions;
  using Comm = ompi_communicator_t*;
  using Datatype = ompi_datatype_t*;
  using Errhandler = ompi_errhandler_t*;
  using Request = ompi_request_t*;
  using Status = ompi_status_public_t;  // null: of no interest

  static constexpr int kSuccess = 0;
  static constexpr int kThreadSingle = 0, kThreadSerialized = 2, kThreadMultiple = 3;
  static constexpr int kTagUpperBound = 0;  // attribute
  static constexpr int kAnySource = -1, kAnyTag = -1;
  static constexpr int kErrorTextBytes = 256;
  static constexpr const char* kCommWorld = "ompi_mpi_comm_world";

  Comm comm_world = Find(kCommWorld);
  Datatype byte = Find("ompi_mpi_byte");
  Errhandler errors_return = Find("ompi_mpi_errors_return");

  int (*Init_thread)(int* argc, char*** argv, int wanted, int* provided) = Find("MPI_Init_thread");
  int (*Initialized)(int* flag) = Find("MPI_Initialized");
  int (*Query_thread)(int* provided) = Find("MPI_Query_thread");
  int (*Finalize)() = Find("MPI_Finalize");
  int (*Finalized)(int* flag) = Find("MPI_Finalized");
  int (*Error_string)(int error, char* text, int* length) = Find("MPI_Error_string");
  int (*Comm_rank)(Comm comm, int* rank) = Find("MPI_Comm_rank");
  int (*Comm_size)(Comm comm, int* size) = Find("MPI_Comm_size");
  int (*Comm_idup)(Comm comm, Comm* made, Request* request) = Find("MPI_Comm_idup");
  int (*Comm_get_attr)(Comm comm, int attribute, void* value,
                       int* found) = Find("MPI_Comm_get_attr");
  int (*Comm_set_errhandler)(Comm comm, Errhandler handler) = Find("MPI_Comm_set_errhandler");
  int (*Ibcast)(void* data, int count, Datatype type, int root, Comm comm,
                Request* request) = Find("MPI_Ibcast");
  int (*Isend)(const void* data, int count, Datatype type, int to, int tag, Comm comm,
               Request* request) = Find("MPI_Isend");
  int (*Issend)(const void* data, int count, Datatype type, int to, int tag, Comm comm,
                Request* request) = Find("MPI_Issend");
  int (*Irecv)(void* data, int count, Datatype type, int from, int tag, Comm comm,
               Request* request) = Find("MPI_Irecv");
  int (*Iprobe)(int from, int tag, Comm comm, int* found, Status* status) = Find("MPI_Iprobe");
  int (*Test)(Request* request, int* complete, Status* status) = Find("MPI_Test");
  int (*Cancel)(Request* request) = Find("MPI_Cancel");
};

// The result of the first call, for the whole life of the process. kUnavailable says that there is
// no Open MPI, that it is too old, or which other MPI the program has loaded.
absl::StatusOr<const OpenMpi*> LoadOpenMpi();

}  // namespace ebb
