#include "ebb/runtime/device/machine.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "absl/strings/ascii.h"

namespace ebb {

std::string BootId(const std::string& root) {
  // Child processes would inherit the descriptor of a std::ifstream.
  const int file = open((root + "/proc/sys/kernel/random/boot_id").c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return "";
  std::array<char, 64> text;  // a UUID of 36 characters and a newline
  const ssize_t bytes = read(file, text.data(), text.size());
  close(file);
  const absl::string_view read_text(text.data(), static_cast<size_t>(std::max<ssize_t>(bytes, 0)));
  return std::string(absl::StripAsciiWhitespace(read_text));
}

std::string HostName() {
  std::array<char, 256> name = {};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

}  // namespace ebb
