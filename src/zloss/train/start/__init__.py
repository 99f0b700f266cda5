"""What a run starts from: its data, its model, its optimizer and its accelerator."""
