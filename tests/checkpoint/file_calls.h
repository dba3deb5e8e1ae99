// Wraps the C library's calls on files for this program. A test sees each call on files of one folder, and answers it
// with an error, or ends the process there. A program that links file_calls.cc has these calls for all of its code,
// the C++ library's included.
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
  // The error with which the call fails; 0: the system does it. kHalf: of a read or write the system does a half.
  // kNothing: an fsync succeeds and asks no disk. On the thread that calls; calls of other threads may come meanwhile.
  static constexpr int kHalf = -1, kNothing = -2;
  using Answer = std::function<int(const FileCall&)>;

  FileCalls(std::string folder, Answer answer);
  FileCalls(const FileCalls&) = delete;
  ~FileCalls();
};

// What a disk answers that is full, or broken.
int ErrorOf(const FileCall& call);

}  // namespace ebb::testing
