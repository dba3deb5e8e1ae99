#include "ebb/runtime/planner/named_machines.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/config/nearest.h"

namespace ebb::planner {
namespace {

constexpr double kGibi = 1 << 30, kTebi = kGibi * 1024;
constexpr int kGpusOfHost = 8, kGpusMax = 1 << 20;

struct Host {
  double network_gb_s, ram, ram_gb_s, cores, disk, disk_read_gb_s, disk_write_gb_s, disk_tbw;
  const char* source;
};
// Hosts of eight GPUs. Four drives of generation 5 or 4, by DeepNVMe's figures.
constexpr Host kGen5{400,
                     2 * kTebi,
                     480,
                     112,
                     28e12,
                     27,
                     11,
                     28e12 * 365 * 5,
                     "assumed: two sockets of 8 channels of DDR5, 400 Gb/s a GPU, four drives of "
                     "generation 5 (DeepSpeed, blogs/deepnvme), one write of their capacity a day "
                     "for five years"};
constexpr Host kGen4{200,
                     2 * kTebi,
                     300,
                     112,
                     28e12,
                     10,
                     5,
                     28e12 * 365 * 5,
                     "assumed: two sockets of 8 channels of DDR4, 200 Gb/s a GPU, four drives of "
                     "generation 4 (DeepSpeed, blogs/deepnvme), one write of their capacity a day "
                     "for five years"};
constexpr Host kServer{
    25,
    1 * kTebi,
    300,
    64,
    14e12,
    10,
    5,
    14e12 * 365 * 5,
    "assumed: a server without NVLink, 200 Gb/s in all, two drives of generation "
    "4, one write of their capacity a day for five years"};
// Eight desktops, or a host that is as large.
constexpr Host kDesktop{
    0,
    8 * 62 * kGibi,
    8 * 60,
    8 * 16,
    8 * 2e12,
    8 * 6.5,
    8 * 4,
    8 * 1200e12,
    "assumed, for each GPU: two channels of DDR5 with 64 GB, 16 cores, one drive "
    "of generation 4 of 2 TB, whose data sheet allows 1200 TB of writes"};

struct Gpu {
  const char* name;
  double memory, reserved;  // GiB
  double teraflops, peak;
  double memory_gb_s;
  double link_gb_s;  // 0: no NVLink
  double pcie_gb_s;
  const Host& host;
  const char* sheet;  // the vendor's figures of memory and peak
  const char* rate;   // the source of `teraflops`
  const char* link;   // and of `link_gb_s`
};
constexpr char kNoNvlink[] = "no NVLink: half of pcie_gb_s";
constexpr char kNcclTests[] = "80% of the wire, as nccl-tests measures it (stas00/ml-engineering)";
constexpr char kSheet[] = "data sheet",
               kGa102[] = "NVIDIA Ampere GA102 GPU architecture whitepaper V2.0",
               kBlackwell[] =
                   "NVIDIA DGX B200 user guide (1,440 GB of eight); the bus of 7,680 bits and the "
                   "memory that its driver reports (pytorch/ao, pull request 4002)";
// Rates of kernels, with attention over half of the positions, of runs without recomputed products
// that tests/planner/published_runs_test.cc does not compare with. Tokens a second of a GPU:
// mosaicml/llm-foundry, scripts/train/benchmarking, 2,048 tokens: 4,792 (H100), 2,262 (A100 of 80
// GB), 9,538 (of 40 GB). IST-DASLab/llmq, 1,024 tokens: 3,900 (L40S) and 17,800 (5090), README;
// 7,003 (4090), benchmarks/4090x1.md. examples/gpt: bench/results/2026-11-26-h200.md.
constexpr Gpu kGpus[] = {
    {"h100", 79.6, 2, 382, 989, 3000, 360, 55, kGen5, kSheet, "llm-foundry (MPT 13B on 8 H100)",
     kNcclTests},
    {"h200", 140.4, 2, 500, 989, 4300, 360, 55, kGen5, kSheet, "examples/gpt (one H200)",
     kNcclTests},
    {"b200", 178.3, 2, 869, 2250, 6900, 720, 55, kGen5, kBlackwell,
     "an H100 (llm-foundry): the same share of the peak; no run of this GPU is taken", kNcclTests},
    {"a100-80", 79.3, 2, 180, 312, 1750, 235, 25, kGen4, kSheet, "llm-foundry (MPT 13B on 8 A100)",
     kNcclTests},
    {"a100-40", 39.4, 2, 161, 312, 1350, 235, 25, kGen4, kSheet,
     "llm-foundry (MPT 3B on 128 A100 of 40 GB)", kNcclTests},
    {"l40s", 44.5, 1, 168, 362, 780, 0, 25, kServer, "NVIDIA L40S datasheet",
     "llmq (Qwen2.5 7B in bf16 on one L40S)", kNoNvlink},
    {"a6000", 47.5, 1, 72, 155, 690, 0, 25, kServer, kGa102,
     "an L40S (llmq): the same share of the peak; no run of this GPU is taken", kNoNvlink},
    {"rtx4090", 23.6, 1, 133, 165, 900, 0, 25, kDesktop, kSheet,
     "llmq (Qwen2.5 3B in bf16 on one 4090)", kNoNvlink},
    {"rtx3090", 23.6, 1, 57, 71, 840, 0, 25, kDesktop, kGa102,
     "an RTX 4090 (llmq): the same share of the peak; no run of this GPU is taken", kNoNvlink},
    {"rtx5090", 31.4, 1, 170, 209, 1600, 0, 50, kDesktop,
     "a summary of NVIDIA's RTX Blackwell GPU architecture whitepaper",
     "llmq (Qwen2.5 1.5B in bf16 on four 5090)", kNoNvlink}};

// Other words for the same.
constexpr std::pair<const char*, const char*> kAliases[] = {{"a100", "a100-80"}};
constexpr char kDesktopName[] = "rtx4090-64gb";

// `part` of a host of eight.
Machine MachineOf(const Gpu& gpu, int gpus, double part) {
  const Host& host = gpu.host;
  Machine machine{.gpus = static_cast<double>(gpus),
                  .gpu_memory = gpu.memory * kGibi,
                  .gpu_reserved = gpu.reserved * kGibi,
                  .gpu_teraflops = gpu.teraflops,
                  .gpu_peak_teraflops = gpu.peak,
                  .gpu_memory_gb_s = gpu.memory_gb_s,
                  .link_gb_s = gpus == 1           ? 0
                               : gpu.link_gb_s > 0 ? gpu.link_gb_s
                                                   : gpu.pcie_gb_s / 2,
                  .pcie_gb_s = gpu.pcie_gb_s,
                  .network_gb_s = gpus == kGpusOfHost ? host.network_gb_s : 0,
                  .ram = host.ram * part,
                  .ram_gb_s = host.ram_gb_s * part,
                  .cores = std::max(1.0, host.cores * part),
                  .disk = host.disk * part,
                  .disk_read_gb_s = host.disk_read_gb_s * part,
                  .disk_write_gb_s = host.disk_write_gb_s * part,
                  .disk_both_gb_s = host.disk_read_gb_s * part,
                  .disk_tbw = host.disk_tbw * part};
  const std::string memory =
      absl::StrCat(gpu.sheet, "; the memory that its driver reports, 86 to 90% of the bandwidth");
  machine.sources = {{"gpu_memory", memory},       {"gpu_memory_gb_s", memory},
                     {"gpu_teraflops", gpu.rate},  {"gpu_peak_teraflops", gpu.sheet},
                     {"link_gb_s", gpu.link},      {"pcie_gb_s", "assumed: 79 to 87% of 16 lanes"},
                     {"ram", host.source},         {"disk", host.source},
                     {"network_gb_s", host.source}};
  return machine;
}

}  // namespace

std::string GpuNames() {
  std::string words;
  for (const Gpu& gpu : kGpus) absl::StrAppend(&words, words.empty() ? "" : "|", gpu.name);
  return words;
}

absl::StatusOr<Machine> MachineOfName(std::string_view name, bool whole_host) {
  const std::string_view full = name == kDesktopName ? "1xrtx4090" : name;
  const size_t x = full.find('x');
  int gpus = 0;
  const bool has_number = x != std::string_view::npos && x > 0 &&
                          absl::SimpleAtoi(absl::string_view(full.data(), x), &gpus);
  std::string_view word = has_number ? full.substr(x + 1) : full;
  for (const auto& [alias, meant] : kAliases) {
    if (word == alias) word = meant;
  }
  const Gpu* const gpu = std::find_if(std::begin(kGpus), std::end(kGpus),
                                      [&](const Gpu& each) { return word == each.name; });
  const std::string nearest =
      config::NearestWord(GpuNames() + "|a100|here|" + kDesktopName, std::string(word));
  if (gpu == std::end(kGpus) || !has_number) {
    const std::string number = has_number ? std::string(full.substr(0, x + 1)) : "1x",
                      meant = nearest.empty() || nearest == "here" || nearest == kDesktopName
                                  ? nearest
                                  : number + nearest;
    return absl::NotFoundError(
        absl::StrCat("no file and no machine is called ", config::Quoted(name),
                     meant.empty() ? "" : "; did you mean ", meant, "; --list shows all"));
  }
  if (gpus < 1 || gpus > kGpusMax)
    return absl::InvalidArgumentError(
        absl::StrCat("machine ", config::Quoted(name), ": from 1 to ", kGpusMax, " GPUs"));
  const bool is_part = gpus < kGpusOfHost && !whole_host;
  Machine machine = MachineOf(*gpu, std::min(gpus, kGpusOfHost),
                              is_part ? static_cast<double>(gpus) / kGpusOfHost : 1);
  if (gpus > kGpusOfHost && machine.network_gb_s <= 0)
    return absl::InvalidArgumentError(absl::StrCat(
        "machine ", config::Quoted(name), ": a host has at most ", kGpusOfHost, " ", gpu->name,
        ", and no network_gb_s for more hosts; write its figures in a file "
        "(--show-machine prints one to start from)"));
  machine.name = std::string(name);
  machine.named_ranks = gpus;
  machine.whole_host = whole_host;
  return machine;
}

}  // namespace ebb::planner
