#include "ebb/runtime/device/opened_library.h"

#include <dlfcn.h>

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ebb {
namespace {

// The file that holds a function.
std::string FileOf(void* function) {
  Dl_info info = {};
  return dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "?";
}

std::string AdviceFor(const WantedLibrary& wanted, bool has_already) {
  const std::string majors = wanted.last_major == 0
                                 ? absl::StrCat(wanted.oldest.major)
                                 : absl::StrCat(wanted.oldest.major, " to ", wanted.last_major);
  const std::string which =
      absl::StrCat(wanted.name, " ", majors, " from ", TextOf(wanted.oldest), " on");
  if (has_already)
    return absl::StrCat(
        "start the program without this one, which it has linked or loaded, and with ", which,
        " instead, or ", wanted.instead);
  return absl::StrCat("install ", which, ", put the folder of its ", wanted.file,
                      " first in LD_LIBRARY_PATH, or ", wanted.instead);
}

}  // namespace

std::string TextOf(const LibraryVersion& version) {
  return absl::StrCat(version.major, ".", version.minor, ".", version.patch);
}

absl::StatusOr<OpenedLibrary> OpenedLibrary::Open(const WantedLibrary& wanted) {
  const bool has_already = dlsym(RTLD_DEFAULT, wanted.version_function) != nullptr;
  const int flags = RTLD_NOW | (wanted.has_plugins ? RTLD_GLOBAL : RTLD_LOCAL);
  OpenedLibrary library(has_already ? RTLD_DEFAULT : dlopen(wanted.file.c_str(), flags),
                        AdviceFor(wanted, has_already));
  if (!has_already && library.handle_ == nullptr) {
    return absl::UnavailableError(absl::StrCat(wanted.needed_for, " need ", wanted.name,
                                               ", which cannot be opened: ", dlerror(), "; ",
                                               library.advice_));
  }
  library.description_ = absl::StrCat(wanted.name, " (", wanted.file, ")");
  void* const version_function = library.Symbol(wanted.version_function);
  if (version_function == nullptr) return library.Lacks(wanted.version_function);
  library.version_ = wanted.version(version_function);
  library.description_ =
      absl::StrCat(wanted.name, " ", TextOf(library.version_), " (", FileOf(version_function), ")");
  if (library.version_ < wanted.oldest ||
      library.version_.major > std::max(wanted.oldest.major, wanted.last_major)) {
    return absl::UnavailableError(absl::StrCat(wanted.needed_for, " cannot use ",
                                               library.description_, ": ", library.advice_));
  }
  return library;
}

void* OpenedLibrary::Symbol(const char* name) const {
  return dlsym(handle_, name);
}

absl::Status OpenedLibrary::Lacks(std::string_view function) const {
  return absl::UnavailableError(absl::StrCat(description_, " has no ",
                                             absl::string_view(function.data(), function.size()),
                                             ": ", advice_));
}

}  // namespace ebb
