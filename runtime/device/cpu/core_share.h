// How many ranks share this machine's cores, as far as the calling thread knows. A hint for one
// place only: Device::Cpu(0), which gives each rank its share of the cores. Set around the body of
// a rank by whoever runs ranks as threads, and once for a process that is one of several ranks.
#pragma once

namespace ebb {

class CoreShare {
 public:
  explicit CoreShare(int ranks);
  ~CoreShare();
  CoreShare(const CoreShare&) = delete;
  CoreShare& operator=(const CoreShare&) = delete;

  // For all threads of this process that are in no CoreShare.
  static void SetForProcess(int ranks);

  // The cores that this process may run on, divided by the ranks that share them; at least 1.
  static int CoresPerRank();
  static int Cores();

 private:
  int outer_;
};

}  // namespace ebb
