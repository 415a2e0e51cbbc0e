"""Sets of runs on Ray Tune. The only room for ray and optuna."""
