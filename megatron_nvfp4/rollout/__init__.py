"""The sampler's side: our quantisation method inside an unforked SGLang or vLLM."""
