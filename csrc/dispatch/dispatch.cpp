// Chooses the instruction set whose kernels run. Together with supported() of each instruction set
// this is the only place that asks what the CPU can do.
#include "dispatch/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "dispatch/kernel_table.h"

namespace qkv {
namespace {

#if defined(__x86_64__)
// On AMD's Zen 4 and 5, vdpbf16ps makes twice as many GFLOP/s of bf16 as FMA does of f32. On
// Intel's CPUs with AMX it makes half as many (Xeon of family 6, model 207, one core: 87 by
// vdpbf16ps, 175 by FMA and 2250 by AMX's tdpbf16ps), so that there, where AMX is not permitted, or
// a virtual machine hides it, widening to f32 takes 0.55 to 0.65 of the time. Cooper Lake, the one
// CPU of Intel's with AVX512-BF16 and without AMX, has not been measured.
bool vdpbf16ps_pays() { return !__builtin_cpu_is("intel") || __builtin_cpu_is("cooperlake"); }
#endif

// The instruction sets of this architecture, best first, whether or not this CPU can run them.
const std::vector<const Implementation*>& implementations() {
  static const std::vector<const Implementation*> all = {
#if defined(__x86_64__)
      &kAmx,
      vdpbf16ps_pays() ? &kAvx512Bf16 : &kAvx512,
      vdpbf16ps_pays() ? &kAvx512 : &kAvx512Bf16,
      &kAvx2,
#elif defined(__aarch64__)
      &kNeon,
#endif
      &kGeneric,
  };
  return all;
}

std::string names_of_supported() {
  std::string names;
  for (const char* name : supported_isas())
    names += (names.empty() ? "" : ", ") + std::string(name);
  return names;
}

// The implementations that add_implementation() was given.
std::vector<const Implementation*>& added() {
  static std::vector<const Implementation*> implementations;
  return implementations;
}

const Implementation& find(const std::string& name, const char* asked_by) {
  for (const Implementation* implementation : added())
    if (name == implementation->name) return *implementation;
  for (const Implementation* implementation : implementations()) {
    if (name != implementation->name) continue;
    if (implementation->supported()) return *implementation;
    throw std::invalid_argument(std::string(asked_by) + ": this CPU cannot run '" + name +
                                "', it can run: " + names_of_supported());
  }
  throw std::invalid_argument(std::string(asked_by) + ": no instruction set is called '" + name +
                              "', expected one of: " + names_of_supported());
}

// Null until somebody asks: the environment is read then, not when the library is loaded.
std::atomic<const Implementation*> active{nullptr};

// What half_products() may be.
constexpr char kNative[] = "native", kFloat32[] = "float32";

const char* half_products_called(const std::string& name, const char* asked_by) {
  for (const char* products : {kNative, kFloat32})
    if (name == products) return products;
  throw std::invalid_argument(std::string(asked_by) +
                              ": no products of half precision are called '" + name +
                              "', expected one of: native, float32");
}

// One of the two; null as above.
std::atomic<const char*> products_in_use{nullptr};

// reproducible(), or as yet unknown.
constexpr int kUnknown = -1;
std::atomic<int> is_reproducible{kUnknown};

// What an environment variable says, or, where it is not set or empty, `otherwise`.
const char* environment(const char* variable, const char* otherwise) {
  const char* const value = std::getenv(variable);
  return value && *value ? value : otherwise;
}

}  // namespace

void add_implementation(const Implementation& implementation) {
  added().push_back(&implementation);
}

std::vector<const Implementation*> supported_implementations() {
  std::vector<const Implementation*> supported;
  for (const Implementation* implementation : implementations())
    if (implementation->supported()) supported.push_back(implementation);
  return supported;
}

std::vector<const char*> supported_isas() {
  std::vector<const char*> names;
  for (const Implementation* implementation : supported_implementations())
    names.push_back(implementation->name);
  return names;
}

const Implementation& active_implementation() {
  const Implementation* implementation = active.load(std::memory_order_acquire);
  if (!implementation) {
    implementation = &find(environment("QKV_ISA", supported_isas().front()), "QKV_ISA");
    active.store(implementation, std::memory_order_release);
  }
  return *implementation;
}

const char* active_isa() { return active_implementation().name; }

namespace {

// Kernels of fixed bits: those of the active implementation, if it is not one of these itself.
const Kernels& fixed_kernels(DType dtype) {
  const Implementation* implementation = &active_implementation();
  if (implementation->kernels(dtype).fixed_bits) return implementation->kernels(dtype);
  while (!implementation->fixed_bits) implementation = implementation->others;
  return implementation->fixed_bits->kernels(dtype);
}

bool has_fixed_bits(const Problem& p) {
  return p.score_way == ScoreWay::fixed || (p.score_way == ScoreWay::automatic && reproducible());
}

// Kernels that multiply no pairs.
const Kernels& widening_kernels(DType dtype) {
  const Implementation& implementation = active_implementation();
  const Kernels& kernels = implementation.kernels(dtype);
  return kernels.multiplies_pairs ? implementation.others->kernels(dtype) : kernels;
}

}  // namespace

const Kernels& active_kernels(DType dtype) {
  if (reproducible()) return fixed_kernels(dtype);
  return half_products() == kNative ? active_implementation().kernels(dtype)
                                    : widening_kernels(dtype);
}

const Kernels& jvp_kernels(const Problem& p) {
  return has_fixed_bits(p) ? fixed_kernels(p.dtype) : widening_kernels(p.dtype);
}

const Kernels& kernels_for(const Problem& p) {
  if (has_fixed_bits(p)) return fixed_kernels(p.dtype);
  const ScoreWay way = p.is_int8() ? ScoreWay::tiles : p.score_way;
  if (way == ScoreWay::elements || way == ScoreWay::tiles) return widening_kernels(p.dtype);
  if (way == ScoreWay::pairs) return active_implementation().kernels(p.dtype);
  return active_kernels(p.dtype);
}

ScoreWay score_way_of(const Problem& p) {
  const Kernels& kernels = kernels_for(p);
  if (kernels.fixed_bits) return ScoreWay::fixed;
  if (few_rows_of(p, kernels.lanes, kernels.multiplies_tiles)) return ScoreWay::few_rows;
  return kernels.multiplies_pairs ? ScoreWay::pairs : ScoreWay::tiles;
}

bool multiplies_pairs(DType dtype) { return active_kernels(dtype).multiplies_pairs; }

const char* half_products() {
  const char* products = products_in_use.load(std::memory_order_relaxed);
  if (!products)
    set_half_products(products = half_products_called(environment("QKV_HALF_PRODUCTS", kNative),
                                                      "QKV_HALF_PRODUCTS"));
  return products;
}

void set_half_products(const char* name) {
  products_in_use.store(half_products_called(name, "set_half_products"), std::memory_order_relaxed);
}

bool reproducible() {
  if (is_reproducible.load(std::memory_order_relaxed) == kUnknown) {
    const std::string said = environment("QKV_REPRODUCIBLE", "0");
    if (said != "0" && said != "1")
      throw std::invalid_argument("QKV_REPRODUCIBLE is '" + said + "', expected 0 or 1");
    set_reproducible(said == "1");
  }
  return is_reproducible.load(std::memory_order_relaxed) != 0;
}

void set_reproducible(bool yes) { is_reproducible.store(yes, std::memory_order_relaxed); }

void set_isa(const char* name) { active.store(&find(name, "set_isa"), std::memory_order_release); }

}  // namespace qkv
