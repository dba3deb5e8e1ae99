// Open MPI's functions, opened when the first world over MPI is made
// (runtime/device/opened_library.h). They are declared here and not by mpi.h, so that a build needs
// no MPI. Open MPI 4 and 5 have one binary interface; tests/comm/mpi_ranks.cc compares it with
// mpi.h. Other MPIs have other handles, and are refused.
#pragma once

#include "absl/status/statusor.h"

struct ompi_communicator_t;
struct ompi_datatype_t;
struct ompi_errhandler_t;
struct ompi_request_t;
struct ompi_status_public_t;

namespace ebb {

struct OpenMpi {
  using Comm = ompi_communicator_t*;
  using Datatype = ompi_datatype_t*;
  using Errhandler = ompi_errhandler_t*;
  using Request = ompi_request_t*;
  using Status = ompi_status_public_t;  // null: of no interest

  static constexpr int kSuccess = 0;
  static constexpr int kThreadSingle = 0, kThreadSerialized = 2, kThreadMultiple = 3;
  static constexpr int kTagUpperBound = 0;  // attribute
  static constexpr int kErrorTextBytes = 256;

  Comm comm_world = nullptr;
  Datatype byte = nullptr;
  Errhandler errors_return = nullptr;

  int (*Init_thread)(int* argc, char*** argv, int wanted, int* provided) = nullptr;
  int (*Initialized)(int* flag) = nullptr;
  int (*Query_thread)(int* provided) = nullptr;
  int (*Finalize)() = nullptr;
  int (*Finalized)(int* flag) = nullptr;
  int (*Error_string)(int error, char* text, int* length) = nullptr;
  int (*Comm_rank)(Comm comm, int* rank) = nullptr;
  int (*Comm_size)(Comm comm, int* size) = nullptr;
  int (*Comm_idup)(Comm comm, Comm* made, Request* request) = nullptr;
  int (*Comm_get_attr)(Comm comm, int attribute, void* value, int* found) = nullptr;
  int (*Comm_set_errhandler)(Comm comm, Errhandler handler) = nullptr;
  int (*Ibcast)(void* data, int count, Datatype type, int root, Comm comm,
                Request* request) = nullptr;
  int (*Isend)(const void* data, int count, Datatype type, int to, int tag, Comm comm,
               Request* request) = nullptr;
  int (*Issend)(const void* data, int count, Datatype type, int to, int tag, Comm comm,
                Request* request) = nullptr;
  int (*Irecv)(void* data, int count, Datatype type, int from, int tag, Comm comm,
               Request* request) = nullptr;
  int (*Test)(Request* request, int* complete, Status* status) = nullptr;
  int (*Cancel)(Request* request) = nullptr;
};

// The result of the first call, for the whole life of the process. kUnavailable says that there is
// no Open MPI, that it is too old, or which other MPI the program has loaded.
absl::StatusOr<const OpenMpi*> LoadOpenMpi();

}  // namespace ebb
