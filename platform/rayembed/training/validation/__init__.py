"""Score a stage's weights during training, and decide by the scores which weights to use and when
to stop.
"""
