// Functions of a library that is opened when it is first needed, not linked: a program starts where
// it is missing, and a newer compatible one can take its place without a new build. The one that the
// program has already is used (two in a process disturb each other), else the one that the dynamic
// linker finds; either is refused if its version is not one that Ebb was written for.
//
//   const absl::StatusOr<OpenedLibrary> library = OpenedLibrary::Open(wanted);
//   absl::Status found = library->Find("ncclCommSplit", nccl.CommSplit);
//
// What is opened stays so until the process ends: nobody knows when its last thread has left it. All
// errors are kUnavailable.
#pragma once

#include <compare>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebb {

struct LibraryVersion {
  int major = 0, minor = 0, patch = 0;
  friend auto operator<=>(const LibraryVersion&, const LibraryVersion&) = default;
};
// "2.28.9".
std::string TextOf(const LibraryVersion& version);

struct WantedLibrary {
  std::string name;                        // "NCCL", as people call it
  std::string file;                        // "libnccl.so.2", as the dynamic linker looks for it
  std::string needed_for;                  // "ranks on GPUs", as a message begins
  std::string instead;                     // "use --device cpu", as it ends
  LibraryVersion oldest;                   // later ones of its major version will do, too
  const char* version_function = nullptr;  // also tells whether the program has the library already
  LibraryVersion (*version)(void* version_function) = nullptr;  // calls it
};

class OpenedLibrary {
 public:
  static absl::StatusOr<OpenedLibrary> Open(const WantedLibrary& wanted);

  const LibraryVersion& version() const { return version_; }
  // "NCCL 2.28.9 (/usr/lib/libnccl.so.2)".
  const std::string& description() const { return description_; }

  // Function: a pointer to a function, of the type that the library's header declares.
  template <class Function>
  absl::Status Find(const char* name, Function& function) const {
    function = reinterpret_cast<Function>(Symbol(name));
    return function != nullptr ? absl::OkStatus() : Lacks(name);
  }
  // Null in libraries that do not have it.
  template <class Function>
  void FindIfThere(const char* name, Function& function) const {
    function = reinterpret_cast<Function>(Symbol(name));
  }

 private:
  OpenedLibrary(void* handle, std::string advice) : handle_(handle), advice_(std::move(advice)) {}

  void* Symbol(const char* name) const;
  absl::Status Lacks(std::string_view function) const;

  void* handle_;        // dlopen's, or RTLD_DEFAULT
  std::string advice_;  // how to get one that will do
  LibraryVersion version_;
  std::string description_;
};

}  // namespace ebb
