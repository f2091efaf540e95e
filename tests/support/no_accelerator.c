/* Preloaded before libtorch_cpu: torch's CUDA build takes itself for one without an accelerator.

   Else autograd asks the driver, which a machine without a GPU lacks, for its streams before each
   backward pass, and fails. Tensors keep the device that they say they are on. */

short _ZN2at11accelerator14getAcceleratorEb(_Bool checked) { return 0; } /* std::nullopt */

_Bool _ZN2at11accelerator13isAcceleratorEN3c1010DeviceTypeE(signed char type) { return 0; }
