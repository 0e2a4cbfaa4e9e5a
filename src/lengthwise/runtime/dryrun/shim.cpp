// Lets torch's fake tensors use device "cuda" in a CPU-only build of torch: no kernel ever runs, so a device guard whose
// operations do nothing and hooks that say "there is a CUDA device" are all that autograd asks for. shim.py builds it, and
// loads it before torch.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using namespace c10;
using namespace c10::impl;

Device cuda0() { return Device(DeviceType::CUDA, 0); }
Stream default_stream() { return Stream(Stream::DEFAULT, cuda0()); }

struct NoOpGuard final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return cuda0(); }
  Device getDevice() const override { return cuda0(); }
  Stream getStream(Device) const noexcept override { return default_stream(); }
  Stream getDefaultStream(Device) const override { return default_stream(); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

struct PresentCuda : public at::CUDAHooksInterface {
  PresentCuda(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
};

NoOpGuard guard;
}  // namespace

namespace at {
using ::PresentCuda;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PresentCuda)
}  // namespace at

extern "C" int install() {
  device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  return 0;
}
