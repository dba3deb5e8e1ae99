// Functions of a library that is opened when it is first needed, not linked. So a program starts on
// a machine without the library, and needs no new build for a newer compatible one. A library that
// the program has already is used, because two in a process disturb each other; otherwise the one
// that the dynamic linker finds. Either is refused if Ebb was not written for its version.
//
//   const absl::StatusOr<OpenedLibrary> library = OpenedLibrary::Open(wanted);
//   absl::Status found = library->Find("ncclAllGather", nccl.AllGather);
//
// An opened library stays open until the process ends, because its own threads may still run. All
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
  std::string name;                        // "NCCL": its name in messages
  std::string file;                        // "libnccl.so.2": its name for the dynamic linker
  std::string needed_for;                  // "ranks on GPUs": begins a message
  std::string instead;                     // "run on the CPU": ends a message
  LibraryVersion oldest;                   // later ones of its major version work too
  int last_major = 0;                      // so do versions up to this major version; 0: no other
  bool has_plugins = false;                // which look for its functions among the program's
  const char* version_function = nullptr;  // also shows whether the program has the library already
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
  // Null in libraries that lack it.
  template <class Function>
  void FindIfThere(const char* name, Function& function) const {
    function = reinterpret_cast<Function>(Symbol(name));
  }

 private:
  OpenedLibrary(void* handle, std::string advice) : handle_(handle), advice_(std::move(advice)) {}

  void* Symbol(const char* name) const;
  absl::Status Lacks(std::string_view function) const;

  void* handle_;        // dlopen's, or RTLD_DEFAULT
  std::string advice_;  // how to get a usable one
  LibraryVersion version_;
  std::string description_;
};

// The base of a struct of functions of one library. Each member finds the function of its name:
//
//   struct Nccl : LibraryFunctions {
//     using LibraryFunctions::LibraryFunctions;
//     decltype(&::ncclSend) Send = Find("ncclSend");
//   };
class LibraryFunctions {
 public:
  explicit LibraryFunctions(OpenedLibrary library) : library_(std::move(library)) {}
  // The first function that the library lacks, as an error. OK: the library lacks none.
  const absl::Status& found() const { return found_; }

 protected:
  struct Symbol {
    void* address = nullptr;
    template <class Pointer>
    operator Pointer() const {
      return reinterpret_cast<Pointer>(address);
    }
  };
  Symbol Find(const char* name) {
    Symbol symbol;
    found_.Update(library_.Find(name, symbol.address));
    return symbol;
  }
  // Null in libraries that lack it.
  Symbol FindIfThere(const char* name) {
    Symbol symbol;
    library_.FindIfThere(name, symbol.address);
    return symbol;
  }

 private:
  OpenedLibrary library_;
  absl::Status found_;
};

}  // namespace ebb
