// Wraps the C library's calls on files. A test sees each call on files of one folder. It can answer
// the call with an error, or end the process there. All code of a program that links file_calls.cc
// makes these calls, including the C++ library.
#pragma once

#include <cerrno>
#include <functional>
#include <string>
#include <vector>

namespace ebb::testing {

struct FileCall {
  const char* name = "";  // "pwrite"
  std::string path;       // below the folder; "" for the folder itself
};

// Watches from its construction to its destruction; one at a time.
class FileCalls {
 public:
  // The error with which the call fails; 0: the system does it. kHalf: of a read or write the
  // system does a half. kNothing: an fsync succeeds and asks no disk. On the thread that calls;
  // calls of other threads may come meanwhile.
  static constexpr int kHalf = -1, kNothing = -2;
  using Answer = std::function<int(const FileCall&)>;

  FileCalls(std::string folder, Answer answer);
  FileCalls(const FileCalls&) = delete;
  ~FileCalls();
};

// The answers of a full disk, and of a broken disk.
int ErrorOf(const FileCall& call);

}  // namespace ebb::testing
