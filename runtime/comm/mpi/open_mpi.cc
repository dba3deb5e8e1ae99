#include "ebb/runtime/comm/mpi/open_mpi.h"

#include <dlfcn.h>

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"

namespace ebb {
namespace {

constexpr const char* kNeededFor = "CPU ranks on several hosts";
constexpr const char* kInstead = "start all ranks on one host";
constexpr const char* kVersionFunction = "MPI_Get_library_version";

std::string VersionText(void* version_function) {
  constexpr int kBytes = 8192;  // of the longest, MPICH's
  char text[kBytes] = {};
  int length = 0;
  reinterpret_cast<int (*)(char*, int*)>(version_function)(text, &length);
  return text;
}

// "Open MPI v4.1.4, package: ...".
LibraryVersion OpenMpiVersionOf(void* version_function) {
  LibraryVersion version;
  std::sscanf(VersionText(version_function).c_str(), "Open MPI v%d.%d.%d", &version.major,
              &version.minor, &version.patch);
  return version;
}

absl::StatusOr<OpenMpi> Open() {
  void* const loaded = dlsym(RTLD_DEFAULT, kVersionFunction);
  if (loaded != nullptr && dlsym(RTLD_DEFAULT, OpenMpi::kCommWorld) == nullptr) {
    const std::string text = VersionText(loaded);
    return absl::UnavailableError(absl::StrCat(
        kNeededFor, " need Open MPI, but this program has linked or loaded another MPI (",
        text.substr(0, text.find('\n')), "): build and start it with Open MPI, or ", kInstead));
  }
  EBB_ASSIGN_OR_RETURN(const OpenedLibrary library,
                       OpenedLibrary::Open({.name = "Open MPI",
                                            .file = "libmpi.so.40",
                                            .needed_for = kNeededFor,
                                            .instead = kInstead,
                                            .oldest = {.major = 4, .minor = 0, .patch = 0},
                                            .last_major = 5,
                                            .has_plugins = true,
                                            .version_function = kVersionFunction,
                                            .version = &OpenMpiVersionOf}));
  OpenMpi mpi(library);
  EBB_RETURN_IF_ERROR(mpi.found());
  return mpi;
}

}  // namespace

absl::StatusOr<const OpenMpi*> LoadOpenMpi() {
  static const absl::StatusOr<OpenMpi>& loaded = *new absl::StatusOr<OpenMpi>(Open());
  if (!loaded.ok()) return loaded.status();
  return &*loaded;
}

}  // namespace ebb
